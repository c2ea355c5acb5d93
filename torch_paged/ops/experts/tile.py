"""One projection of the chosen experts on tensor cores: tokens of an expert share its weights.

A program takes a tile of up to TOKENS tokens of one expert (group.py makes the tiles) and ROWS
output features, with SPLITS > 1 a share of the sum. Tiles of weights and of x stream through
shared memory, STAGES of them in flight. Tiles that no expert needs end at once: how many there are
is known on the device alone.
"""

from __future__ import annotations

from torch_paged.ops.experts.parts import gate, load_weights, locate_features
from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit(do_not_specialize_on_alignment=["num_pairs", "max_tiles"])
def _expert_tile_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    tiles_ptr,
    order_ptr,
    out_ptr,
    num_pairs,
    max_tiles,
    num_features,
    stride_x,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    alpha,
    limit,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    STREAMED: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[split, p, n] = sum_k w[expert, n, k] * x[p // TOP_K, k] for the pairs p of a tile."""
    if PDL:
        gdc_launch_dependents()
    block = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    if PDL:
        gdc_wait()
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(tiles_ptr + max_tiles + tile)
    count = tl.load(tiles_ptr + 2 * max_tiles + tile)
    r_token = tl.arange(0, TOKENS)
    in_tile = r_token < count
    pair = tl.load(order_ptr + first + r_token, mask=in_tile, other=0)

    feature, exists = locate_features(block, num_features, ROWS, GATED, INTERLEAVED)
    TILES: tl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    k = split * (TILES * BLOCK_K) + tl.arange(0, BLOCK_K)[None, :]
    w_ptrs = w_ptr + expert * stride_we + feature[:, None].to(tl.int64) * stride_wn
    w_ptrs += k.to(tl.int64) * stride_wk
    x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64)[:, None] * stride_x + k
    acc = tl.zeros([feature.shape[0], TOKENS], tl.float32)
    for index in tl.range(0, TILES, num_stages=STAGES):
        k_tile = k + index * BLOCK_K
        weight = load_weights(w_ptrs, k_tile, exists[:, None], K, EVEN_K, EVEN_N, STREAMED)
        if EVEN_K:
            x = tl.load(x_ptrs + index * BLOCK_K, mask=in_tile[:, None], other=0.0)
        else:
            mask = in_tile[:, None] & (k_tile < K)
            x = tl.load(x_ptrs + index * BLOCK_K, mask=mask, other=0.0)
        if UPCAST:
            weight = weight.to(tl.float32)
            x = x.to(tl.float32)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
        w_ptrs += BLOCK_K * stride_wk

    y = acc
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * stride_be + feature, mask=exists, other=0.0)
        y += bias.to(tl.float32)[:, None]
    if GATED:
        y = gate(y, alpha, limit, INTERLEAVED, ACTIVATION)
    column = block * ROWS + tl.arange(0, ROWS)[:, None]
    row = (split * num_pairs + pair).to(tl.int64)[None, :]
    mask = in_tile[None, :] & (column < num_features)
    out_ptrs = out_ptr + row * num_features + column
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)
