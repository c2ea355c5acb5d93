"""The prefill kernel over latents: one program a tile of (token, head) pairs."""

from __future__ import annotations

from torch_paged.ops.latent_attention.stages import attend_latents, load_query, load_tokens
from torch_paged.ops.paged_attention.stages import NO_SCORE
from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def latent_prefill_kernel(
    q_ptr,
    r_ptr,
    latent_cache_ptr,
    rope_cache_ptr,
    block_table_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    context_lens_ptr,
    out_ptr,
    scale,
    num_tokens,
    num_rows,
    stride_qt,
    stride_qh,
    stride_rt,
    stride_rh,
    stride_table,
    stride_lcb: tl.constexpr,
    stride_lcs: tl.constexpr,
    stride_rcb: tl.constexpr,
    stride_rcs: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[i, h] = sum_j softmax_j(scale (q[i, h] . c[j] + r[i, h] . k[j])) c[j], j <= prefix + i.

    The M dimension of a tile holds (token, head) pairs, head fastest: latents are read once for
    all heads. Row b owns the tiles from cu_seqlens[b] * NUM_HEADS // BLOCK_M + b on: always enough
    of them, without knowing the lengths on the host. The row after the last one stands for the
    padding tokens behind it.
    """
    # Late tiles see the most tokens and go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.arange(0, BLOCK_B)
    starts = tl.load(cu_seqlens_ptr + b, mask=b <= num_rows, other=0)
    first_tiles = tl.where(b <= num_rows, starts * NUM_HEADS // BLOCK_M + b, 0x7FFFFFFF)
    row = tl.sum((first_tiles <= tile).to(tl.int32), axis=0) - 1
    begin = tl.load(cu_seqlens_ptr + row)
    end = tl.load(cu_seqlens_ptr + row + 1, mask=row < num_rows, other=num_tokens)
    length = end - begin
    first_pair = (tile - begin * NUM_HEADS // BLOCK_M - row) * BLOCK_M

    if first_pair < length * NUM_HEADS:
        pair = first_pair + tl.arange(0, BLOCK_M)
        token = pair // NUM_HEADS
        head = pair % NUM_HEADS
        in_row = token < length
        d = tl.arange(0, BLOCK_R)
        n = tl.arange(0, BLOCK_N)
        global_token = (begin + token).to(tl.int64)
        out_ptrs = out_ptr + ((global_token * NUM_HEADS + head) * RANK)[:, None] + d[None, :]
        out_mask = in_row[:, None] & (d < RANK)[None, :]
        slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1)
        if slot < 0:
            tl.store(out_ptrs, tl.zeros([BLOCK_M, BLOCK_R], out_ptr.dtype.element_ty), out_mask)
        else:
            q_rows = q_ptr + global_token * stride_qt + head * stride_qh
            r_rows = r_ptr + global_token * stride_rt + head * stride_rh
            q = load_query(q_rows, in_row, RANK, BLOCK_R)
            r = load_query(r_rows, in_row, ROPE, BLOCK_P)
            table_ptr = block_table_ptr + slot.to(tl.int64) * stride_table
            prefix = tl.load(context_lens_ptr + slot)
            last_token = tl.minimum((first_pair + BLOCK_M - 1) // NUM_HEADS, length - 1)
            high = prefix + last_token + 1
            peak = tl.full([BLOCK_M], NO_SCORE, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            last_block = (high - 1) // BLOCK_SIZE
            block = tl.load(table_ptr + tl.minimum(n // BLOCK_SIZE, last_block))
            for start in tl.range(0, high, BLOCK_N, num_stages=NUM_STAGES):
                j = start + n
                exists = j < high
                inside = n % BLOCK_SIZE
                c = load_tokens(
                    latent_cache_ptr, block, inside, exists, stride_lcb, stride_lcs, RANK, BLOCK_R
                )
                k = load_tokens(
                    rope_cache_ptr, block, inside, exists, stride_rcb, stride_rcs, ROPE, BLOCK_P
                )
                # One tile ahead, so that the next loads need not wait for their addresses.
                following = (start + BLOCK_N + n) // BLOCK_SIZE
                block = tl.load(table_ptr + tl.minimum(following, last_block))
                seen = exists[None, :] & (j[None, :] <= (prefix + token)[:, None])
                peak, total, acc = attend_latents(
                    q, r, c, k, seen, scale, peak, total, acc, PRECISION
                )
            out = acc * (1.0 / total)[:, None]
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=out_mask)


__all__ = ["latent_prefill_kernel"]
