"""One projection of the chosen experts on FP32 units: each chosen expert for one token.

A program owns some output features of one (token, expert) pair and, with SPLITS > 1, a share of
the sum; it reads them tile by tile, each tile on its way while its predecessor is multiplied. The
weights that it reads are known only when the router is done, so none of them is read before.

Tiles follow the matrix: a few features by many k where k is contiguous, many features by a few k
where the features are. The order of a sum depends on neither the number of tokens nor the grid.
"""

from __future__ import annotations

from torch_paged.ops.experts.parts import gate, load_weights, locate_features
from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _expert_gemv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    ids_ptr,
    out_ptr,
    num_pairs,
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
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[split, p, n] = sum_k w[ids[p], n, k] * x[p // TOP_K, k], gated and biased if so."""
    if PDL:
        gdc_launch_dependents()
    block = tl.program_id(0)
    pair = tl.program_id(1)
    split = tl.program_id(2)
    feature, exists = locate_features(block, num_features, ROWS, GATED, INTERLEAVED)
    TILES: tl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    r_k = split * (TILES * BLOCK_K) + tl.arange(0, BLOCK_K)
    k = r_k[None, :]
    offsets = feature[:, None].to(tl.int64) * stride_wn + k.to(tl.int64) * stride_wk
    exists = exists[:, None]
    if PDL:
        gdc_wait()

    expert = tl.load(ids_ptr + pair).to(tl.int64)
    w_ptrs = w_ptr + expert * stride_we + offsets
    x_ptrs = x_ptr + (pair // TOP_K).to(tl.int64) * stride_x + r_k
    weight = load_weights(w_ptrs, k, exists, K, EVEN_K, EVEN_N, True)
    bias = tl.zeros([feature.shape[0]], tl.float32)
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert * stride_be + feature
        bias = tl.load(bias_ptrs, mask=tl.reshape(exists, [feature.shape[0]]), other=0.0)
    acc = tl.zeros([feature.shape[0], BLOCK_K], tl.float32)
    for tile in range(TILES):
        if EVEN_K:
            x = tl.load(x_ptrs)
        else:
            x = tl.load(x_ptrs, mask=r_k < K, other=0.0)
        this = weight
        r_k += BLOCK_K
        k += BLOCK_K
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * stride_wk
        # One condition for the whole tile leaves the loads as wide as they are.
        more = tile + 1 < TILES
        if not EVEN_N:
            more = more & exists
        weight = load_weights(w_ptrs, k, more, K, EVEN_K, False, True)
        acc += this.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, axis=1, keep_dims=True)
    if HAS_BIAS:
        y += bias.to(tl.float32)[:, None]
    if GATED:
        y = gate(y, alpha, limit, INTERLEAVED, ACTIVATION)
    column = block * ROWS + tl.arange(0, ROWS)[:, None]
    row = (split * num_pairs + pair).to(tl.int64)
    out = y.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * num_features + column, out, mask=column < num_features)
