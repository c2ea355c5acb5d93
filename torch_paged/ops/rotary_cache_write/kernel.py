"""The Triton kernel of `rotary_cache_write` and its launcher."""

from __future__ import annotations

from torch import Tensor

from torch_paged.ops.triton_compat import (
    gdc_launch_dependents,
    gdc_wait,
    tl,
    triton,
    use_pdl,
)

# Elements of one program's tile of heads: small enough to spread a few decode rows.
_TILE = 1024


@triton.jit
def _load_gain(gain_rows, dim, in_dim, in_heads, norm_offset, FULL_WIDTH: tl.constexpr):
    """offset + gain in fp32: [1, dims] when every head shares it, else [heads, dims]."""
    mask = in_dim & in_heads if FULL_WIDTH else in_dim
    return tl.load(gain_rows + dim, mask=mask, other=0.0).to(tl.float32) + norm_offset


@triton.jit
def _gained(x_hat, gain, DTYPE: tl.constexpr, CAST_BEFORE_GAIN: tl.constexpr):
    """x_hat * gain in fp32, rounded to DTYPE as the model's norm module rounds."""
    if CAST_BEFORE_GAIN:
        x_hat = x_hat.to(DTYPE).to(tl.float32)
    return (x_hat * gain).to(DTYPE).to(tl.float32)


@triton.jit
def _rotate_and_write(
    x_ptr,
    gain_ptr,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    stride_xh,
    stride_ch,
    heads,
    num_heads,
    num_cached_heads,
    eps,
    norm_offset,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CAST_BEFORE_GAIN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FULL_WIDTH: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
    HAS_CACHE: tl.constexpr,
):
    """Norm and rotate a tile of heads of one token in place; copy it to the cache row."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    CACHE_DTYPE: tl.constexpr = cache_ptr.dtype.element_ty
    PASS: tl.constexpr = HEAD_DIM - 2 * HALF
    in_heads = heads[:, None] < num_heads
    x_rows = x_ptr + heads[:, None] * stride_xh
    in_cached_heads = heads[:, None] < num_cached_heads
    cache_rows = cache_ptr + heads[:, None] * stride_ch
    if FULL_WIDTH:
        gain_rows = gain_ptr + heads[:, None] * HEAD_DIM
    else:
        gain_rows = gain_ptr
    squares = tl.zeros([heads.shape[0]], tl.float32)
    if HALF > 0:
        pair = tl.arange(0, BLOCK_HALF)[None, :]
        if INTERLEAVED:
            dim_a = 2 * pair
            dim_b = 2 * pair + 1
        else:
            dim_a = pair
            dim_b = pair + HALF
        pair_mask = in_heads & (pair < HALF)
        a = tl.load(x_rows + dim_a, mask=pair_mask, other=0.0).to(tl.float32)
        b = tl.load(x_rows + dim_b, mask=pair_mask, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + pair, mask=pair < HALF, other=0.0)
        sin = tl.load(sin_ptr + pair, mask=pair < HALF, other=0.0)
        if HAS_NORM:
            squares += tl.sum(a * a + b * b, axis=1)
            gain_a = _load_gain(gain_rows, dim_a, pair < HALF, in_heads, norm_offset, FULL_WIDTH)
            gain_b = _load_gain(gain_rows, dim_b, pair < HALF, in_heads, norm_offset, FULL_WIDTH)
    if PASS > 0:
        dim_p = 2 * HALF + tl.arange(0, BLOCK_PASS)[None, :]
        pass_mask = in_heads & (dim_p < HEAD_DIM)
        p = tl.load(x_rows + dim_p, mask=pass_mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += tl.sum(p * p, axis=1)
            gain_p = _load_gain(
                gain_rows, dim_p, dim_p < HEAD_DIM, in_heads, norm_offset, FULL_WIDTH
            )
    # The stores below hit addresses that other threads of the program may still have to read.
    tl.debug_barrier()
    if HAS_NORM:
        if FULL_WIDTH:
            scale = tl.rsqrt(tl.sum(squares, axis=0) / (num_heads * HEAD_DIM) + eps)
        else:
            scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        if HALF > 0:
            a = _gained(a * scale, gain_a, DTYPE, CAST_BEFORE_GAIN)
            b = _gained(b * scale, gain_b, DTYPE, CAST_BEFORE_GAIN)
        if PASS > 0:
            p = _gained(p * scale, gain_p, DTYPE, CAST_BEFORE_GAIN)
    if HALF > 0:
        rotated_a = (a * cos - b * sin).to(DTYPE)
        rotated_b = (b * cos + a * sin).to(DTYPE)
        tl.store(x_rows + dim_a, rotated_a, mask=pair_mask)
        tl.store(x_rows + dim_b, rotated_b, mask=pair_mask)
        if HAS_CACHE:
            cached_mask = in_cached_heads & (pair < HALF)
            tl.store(cache_rows + dim_a, rotated_a.to(CACHE_DTYPE), mask=cached_mask)
            tl.store(cache_rows + dim_b, rotated_b.to(CACHE_DTYPE), mask=cached_mask)
    if PASS > 0:
        if HAS_NORM:
            tl.store(x_rows + dim_p, p.to(DTYPE), mask=pass_mask)
        if HAS_CACHE:
            kept = p.to(DTYPE).to(CACHE_DTYPE)
            tl.store(cache_rows + dim_p, kept, mask=in_cached_heads & (dim_p < HEAD_DIM))


@triton.jit
def _rotary_cache_write_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    q_norm_ptr,
    k_norm_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_kcb,
    stride_kch,
    stride_kcs,
    stride_vcb,
    stride_vch,
    stride_vcs,
    num_query_heads,
    num_kv_heads,
    num_query_tiles,
    eps,
    norm_offset,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    CAST_BEFORE_GAIN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FULL_WIDTH: tl.constexpr,
    BLOCK_HQ: tl.constexpr,
    BLOCK_HKV: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token and one tile of heads a program: first the query tiles, then the key/value tiles.

    Query tiles rotate in place; key/value tiles rotate the key in place and write both to the
    cache row slot_mapping[token] = block * BLOCK_SIZE + offset, if it is not negative.
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    cos_row = cos_ptr + token * HALF
    sin_row = sin_ptr + token * HALF
    if tile < num_query_tiles:
        _rotate_and_write(
            query_ptr + token * stride_qt,
            q_norm_ptr,
            cos_row,
            sin_row,
            query_ptr,
            stride_qh,
            stride_qh,
            tile * BLOCK_HQ + tl.arange(0, BLOCK_HQ),
            num_query_heads,
            0,
            eps,
            norm_offset,
            HEAD_DIM,
            HALF,
            HAS_Q_NORM,
            CAST_BEFORE_GAIN,
            INTERLEAVED,
            FULL_WIDTH,
            BLOCK_HALF,
            BLOCK_PASS,
            False,
        )
    else:
        heads = (tile - num_query_tiles) * BLOCK_HKV + tl.arange(0, BLOCK_HKV)
        slot = tl.load(slot_mapping_ptr + token)
        # A negative slot has no place in the cache.
        num_cached_heads = tl.where(slot >= 0, num_kv_heads, 0)
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        _rotate_and_write(
            key_ptr + token * stride_kt,
            k_norm_ptr,
            cos_row,
            sin_row,
            k_cache_ptr + block * stride_kcb + offset * stride_kcs,
            stride_kh,
            stride_kch,
            heads,
            num_kv_heads,
            num_cached_heads,
            eps,
            norm_offset,
            HEAD_DIM,
            HALF,
            HAS_K_NORM,
            CAST_BEFORE_GAIN,
            INTERLEAVED,
            FULL_WIDTH,
            BLOCK_HALF,
            BLOCK_PASS,
            True,
        )
        dim_v = tl.arange(0, BLOCK_DV)[None, :]
        mask = (heads[:, None] < num_cached_heads) & (dim_v < VALUE_DIM)
        value_rows = value_ptr + token * stride_vt + heads[:, None] * stride_vh
        value = tl.load(value_rows + dim_v, mask=mask, other=0.0)
        v_rows = v_cache_ptr + block * stride_vcb + offset * stride_vcs
        v_rows += heads[:, None] * stride_vch
        tl.store(v_rows + dim_v, value.to(v_cache_ptr.dtype.element_ty), mask=mask)


def _launch_rotary_cache_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    interleaved: bool = False,
    full_width_norm: bool = False,
) -> None:
    num_tokens, num_query_heads, head_dim = query.shape
    num_kv_heads, value_dim = value.shape[1:]
    if num_tokens == 0:
        return
    half = 0 if cos is None else cos.shape[1]
    # A norm over the whole projection needs all of its heads in one program.
    heads_per_tile = max(_TILE // triton.next_power_of_2(head_dim), 1)
    block_hq = triton.next_power_of_2(num_query_heads)
    block_hkv = triton.next_power_of_2(num_kv_heads)
    if not full_width_norm:
        block_hq, block_hkv = min(block_hq, heads_per_tile), min(block_hkv, heads_per_tile)
    query_tiles = triton.cdiv(num_query_heads, block_hq)
    if cos is None and q_norm is None:
        query_tiles = 0
    tile = max(block_hq, block_hkv) * triton.next_power_of_2(head_dim)
    pdl = use_pdl(query)
    extra = {"launch_pdl": True} if pdl else {}
    _rotary_cache_write_kernel[(num_tokens, query_tiles + triton.cdiv(num_kv_heads, block_hkv))](
        query,
        key,
        value,
        query if cos is None else cos,
        query if sin is None else sin,
        k_cache,
        v_cache,
        slot_mapping,
        query if q_norm is None else q_norm,
        key if k_norm is None else k_norm,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        num_query_heads,
        num_kv_heads,
        query_tiles,
        eps,
        norm_offset,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=k_cache.shape[2],
        HALF=half,
        HAS_Q_NORM=q_norm is not None,
        HAS_K_NORM=k_norm is not None,
        CAST_BEFORE_GAIN=cast_before_gain and norm_offset == 0.0,
        INTERLEAVED=interleaved,
        FULL_WIDTH=full_width_norm,
        BLOCK_HQ=block_hq,
        BLOCK_HKV=block_hkv,
        BLOCK_HALF=triton.next_power_of_2(max(half, 1)),
        BLOCK_PASS=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
        BLOCK_DV=triton.next_power_of_2(value_dim),
        PDL=pdl,
        num_warps=min(max(tile // 512, 1), 16),
        **extra,
    )
