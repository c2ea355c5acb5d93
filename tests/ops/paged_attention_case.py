"""A poisoned paged pool with known contents, and dense attention over what was written to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter has no bf16 products; on a GPU bf16 is the common case.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    dtype: torch.dtype,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Eager attention in `dtype` of the last query.shape[0] tokens; heads are repeated.

    In float32 the sums over head_dim run left to right, as a chain of multiply-adds does.
    """
    num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads, _ = keys.shape
    query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)
    keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=1)
    values = values.repeat_interleave(num_heads // num_kv_heads, dim=1)
    if dtype == torch.float32:
        scores = torch.zeros(num_heads, num_queries, num_keys, device=query.device)
        for d in range(query.shape[2]):
            scores += query[:, None, :, d].permute(2, 0, 1) * keys[None, :, :, d].permute(2, 0, 1)
        scores *= scale
    else:
        scores = torch.einsum("nhd,lhd->hnl", query, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(num_keys - num_queries, num_keys, device=query.device)[:, None]
    j = torch.arange(num_keys, device=query.device)[None]
    if alibi_slopes is not None:
        if alibi_slopes.dtype == torch.bfloat16:
            scores = scores + (alibi_slopes[:, None, None] * j).to(dtype) * scale
        else:
            scores = scores + (alibi_slopes[:, None, None] * (j - i)).to(dtype)
    hidden = j > i
    if window:
        hidden = hidden | (j <= i - window)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        column = sinks.to(dtype)[:, None, None].expand(num_heads, num_queries, 1)
        scores = torch.cat((scores, column), dim=-1)
    softmax_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.softmax(scores, dim=-1, dtype=softmax_dtype).to(dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.einsum("hnl,lhd->nhd", weights, values)


def assert_within_budget(actual: Tensor, exact: Tensor, low: Tensor) -> None:
    """Allow twice the error of plain low-precision attention plus one rounding."""
    assert torch.isfinite(actual).all()
    rounding = torch.finfo(actual.dtype).eps * exact.abs().max()
    budget = 2 * ((low.double() - exact).abs().max() + rounding)
    error = (actual.double() - exact).abs().max()
    assert error <= budget, f"error {error:.3e} over budget {budget:.3e}"


@dataclass
class Pool:
    """Rows of the given total lengths in shuffled blocks; everything else is poison."""

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor  # [S, max_blocks]
    slots: Tensor  # [B], shuffled
    context_lens: Tensor  # [S], tokens before each row's queries
    keys: list[Tensor]  # of each row, [length, Hkv, D]
    values: list[Tensor]
    block_size: int
    num_written: list[int]

    def written(self) -> Tensor:
        """Return a mask [num_blocks, block_size] of the slots that hold tokens."""
        mask = torch.zeros(self.k_cache.shape[0], self.block_size, dtype=torch.bool)
        for row, count in enumerate(self.num_written):
            for j in range(count):
                block = self.block_table[self.slots[row], j // self.block_size]
                mask[block, j % self.block_size] = True
        return mask.to(self.k_cache.device)


def make_pool(
    lengths: list[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    v_dim: int = 0,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    max_blocks: int = 0,
    num_queries: list[int] | None = None,
    new_token_cached: bool = True,
    poison: float | None = None,
    seed: int = 0,
) -> Pool:
    """Build a pool; a length of 0 makes a padding row (slot -1).

    Unless it is given, poison is infinity in even places of a block and NaN in odd ones: a
    maximum may drop the one and a comparison the other.
    """
    generator = torch.Generator().manual_seed(seed)
    v_dim = v_dim or head_dim
    num_queries = num_queries or [1] * len(lengths)
    counts = [-(-length // block_size) for length in lengths]
    max_blocks = max(max_blocks, max(counts, default=0) + 1)
    num_blocks = sum(counts) + 3
    places = [math.inf, math.nan] if poison is None else [poison, poison]
    unwritten = torch.tensor(places, dtype=dtype).repeat(block_size // 2)[:, None]
    k_cache, v_cache = (
        unwritten.expand(num_blocks, num_kv_heads, -1, dim).clone() for dim in (head_dim, v_dim)
    )
    order = torch.randperm(num_blocks, generator=generator).tolist()
    num_slots = len(lengths) + 2
    slots = torch.randperm(num_slots, generator=generator)[: len(lengths)].int()
    block_table = torch.full((num_slots, max_blocks), -1, dtype=torch.int32)
    context_lens = torch.zeros(num_slots, dtype=torch.int32)
    keys, values, num_written = [], [], []
    for row, length in enumerate(lengths):
        slot = int(slots[row])
        blocks = [order.pop() for _ in range(counts[row])]
        block_table[slot, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        keys.append(torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype))
        values.append(torch.randn(length, num_kv_heads, v_dim, generator=generator).to(dtype))
        context_lens[slot] = max(length - num_queries[row], 0)
        num_written.append(length if new_token_cached else max(length - 1, 0))
        for j in range(num_written[row]):
            k_cache[blocks[j // block_size], :, j % block_size] = keys[row][j]
            v_cache[blocks[j // block_size], :, j % block_size] = values[row][j]
        if length == 0:
            slots[row] = -1
    return Pool(
        k_cache.to(DEVICE),
        v_cache.to(DEVICE),
        block_table.to(DEVICE),
        slots.to(DEVICE),
        context_lens.to(DEVICE),
        [k.to(DEVICE) for k in keys],
        [v.to(DEVICE) for v in values],
        block_size,
        num_written,
    )
