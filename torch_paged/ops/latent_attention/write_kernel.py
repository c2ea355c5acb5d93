"""The kernel that prepares a token for latent attention: norm, rotation and cache write."""

from __future__ import annotations

from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _rotated(x_ptrs, cos, sin, pair, mask, HALF: tl.constexpr, ROTATION: tl.constexpr):
    """Load both elements of the pairs of rows at x_ptrs [H, 1] and rotate them, in fp32."""
    if ROTATION == "halves":
        first = pair
        second = pair + HALF
    else:
        first = 2 * pair
        second = 2 * pair + 1
    a = tl.load(x_ptrs + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptrs + second, mask=mask, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _store_rotated(x_ptrs, a, b, pair, mask, HALF: tl.constexpr, ROTATION: tl.constexpr):
    if ROTATION == "pairs":
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + HALF
    tl.store(x_ptrs + first, a.to(x_ptrs.dtype.element_ty), mask=mask)
    tl.store(x_ptrs + second, b.to(x_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _cache_row(
    token,
    slot_mapping_ptr,
    block_table_ptr,
    slots_ptr,
    context_lens_ptr,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    HAS_MAPPING: tl.constexpr,
):
    """Return block and offset of a token's place in the cache; a negative block for none."""
    if HAS_MAPPING:
        place = tl.load(slot_mapping_ptr + token)
        return tl.where(place >= 0, place // BLOCK_SIZE, -1), place % BLOCK_SIZE
    slot = tl.load(slots_ptr + token)
    live = slot >= 0
    slot = tl.maximum(slot, 0).to(tl.int64)
    position = tl.load(context_lens_ptr + slot, mask=live, other=0).to(tl.int64)
    table_ptr = block_table_ptr + slot * stride_table
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=live, other=-1).to(tl.int64)
    return block, position % BLOCK_SIZE


@triton.jit
def latent_cache_write_kernel(
    query_ptr,
    compressed_ptr,
    cos_ptr,
    sin_ptr,
    latent_cache_ptr,
    rope_cache_ptr,
    norm_ptr,
    slot_mapping_ptr,
    block_table_ptr,
    slots_ptr,
    context_lens_ptr,
    stride_qt,
    stride_qh,
    stride_ct,
    stride_table,
    stride_lcb,
    stride_lcs,
    stride_rcb,
    stride_rcs,
    eps,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    ROTATION: tl.constexpr,
    HAS_MAPPING: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token a program of the second dimension's first tile, then tiles of its query heads.

    The first normalises the latent, rotates the key and writes both, in place and to the cache;
    the others rotate the last 2 * HALF dimensions of their heads in place.
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    in_half = pair < HALF
    cos = tl.load(cos_ptr + token * HALF + pair, mask=in_half, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + pair, mask=in_half, other=0.0)
    if tile > 0:
        head = (tile - 1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        mask = (head < NUM_HEADS) & in_half
        rows = query_ptr + token * stride_qt + head * stride_qh + NOPE
        a, b = _rotated(rows, cos, sin, pair, mask, HALF, ROTATION)
        # The stores hit addresses that other threads of the program may still have to read.
        tl.debug_barrier()
        _store_rotated(rows, a, b, pair, mask, HALF, ROTATION)
    else:
        block, offset = _cache_row(
            token,
            slot_mapping_ptr,
            block_table_ptr,
            slots_ptr,
            context_lens_ptr,
            stride_table,
            BLOCK_SIZE,
            HAS_MAPPING,
        )
        # A token without a place keeps nothing.
        kept_rank = tl.where(block >= 0, RANK, 0)
        kept_half = tl.where(block >= 0, HALF, 0)
        d = tl.arange(0, BLOCK_R)
        in_rank = d < RANK
        row = compressed_ptr + token * stride_ct
        x = tl.load(row + d, mask=in_rank, other=0.0)
        gain = tl.load(norm_ptr + d, mask=in_rank, other=0.0).to(tl.float32)
        key = row + RANK + tl.zeros([1, 1], tl.int32)
        key_a, key_b = _rotated(key, cos, sin, pair, in_half, HALF, ROTATION)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / RANK + eps)
        latent = ((wide * scale).to(x.dtype).to(tl.float32) * gain).to(x.dtype)
        tl.debug_barrier()
        tl.store(row + d, latent, mask=in_rank)
        _store_rotated(key, key_a, key_b, pair, in_half, HALF, ROTATION)
        latent_row = latent_cache_ptr + block * stride_lcb + offset * stride_lcs
        kept = latent.to(latent_cache_ptr.dtype.element_ty)
        tl.store(latent_row + d, kept, mask=d < kept_rank)
        rope_row = rope_cache_ptr + block * stride_rcb + offset * stride_rcs
        rope_row += tl.zeros([1, 1], tl.int32)
        # Rounded as in the projection before the cache's dtype rounds.
        key_a = key_a.to(x.dtype).to(tl.float32)
        key_b = key_b.to(x.dtype).to(tl.float32)
        _store_rotated(rope_row, key_a, key_b, pair, pair < kept_half, HALF, ROTATION)


__all__ = ["latent_cache_write_kernel"]
