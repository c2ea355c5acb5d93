"""KV cache: block ownership (no torch), prefix reuse (no torch) and the pool of tensors."""
