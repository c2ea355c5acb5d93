"""The GEMV of `joined_linear`: its rows are sums of a stream and a normed branch.

    total = stream + norm(branch)       rounded wherever `rms_norm_add` rounds
    out   = fused_linear(total)

Every program makes the rows for itself, instead of a kernel in between. A first pass sums the
squares of the branch. After that each tile of the total is made once by all threads of a program
and handed to its warps by way of shared memory: if every warp made what it multiplies, as in
`gemv.py`, then by the count of its instructions Gemma-3-4B's gate and up projection would keep an
H200 issuing them for as long as its weights take to arrive. One program more than there are blocks
of output features stores the total.

The weights are held and summed as in `gemv.py`.
"""

from __future__ import annotations

from torch_paged.ops.fused_linear.gemv import _feature_sums, _lane_sums, _load_x
from torch_paged.ops.fused_linear.parts import (
    finish,
    load_bias,
    load_gain,
    load_streamed,
    locate,
)
from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _scale_of(
    branch_rows, token_mask, eps, K: tl.constexpr, STEP: tl.constexpr, EVEN_T: tl.constexpr
):
    """Return rsqrt(mean_k branch^2 + eps), [T, 1, 1, 1]; the threads share each row."""
    r_step = tl.arange(0, STEP)[None, None, None, :]
    squares = tl.zeros([branch_rows.shape[0], 1, 1, STEP], tl.float32)
    for start in tl.static_range(0, K, STEP):
        k = start + r_step
        branch = _load_x(branch_rows + k, k, token_mask, K, start + STEP <= K, EVEN_T)
        branch = branch.to(tl.float32)
        squares += branch * branch
    return tl.rsqrt(tl.sum(squares, axis=3)[:, :, :, None] / K + eps)


@triton.jit
def _join(
    branch, stream, scale, gain, offset, HAS_GAIN: tl.constexpr, CAST_BEFORE_GAIN: tl.constexpr
):
    """Return stream + norm(branch) in their dtype."""
    normed = branch.to(tl.float32) * scale
    if CAST_BEFORE_GAIN:
        normed = normed.to(branch.dtype).to(tl.float32)
    if HAS_GAIN:
        normed *= gain.to(tl.float32) + offset
    normed = normed.to(branch.dtype).to(tl.float32)
    return (normed + stream.to(tl.float32)).to(stream.dtype)


@triton.jit
def _store_total(
    branch_rows,
    stream_rows,
    join_ptr,
    total_rows,
    token_mask,
    eps,
    offset,
    K: tl.constexpr,
    STEP: tl.constexpr,
    EVEN_T: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    CAST_BEFORE_GAIN: tl.constexpr,
):
    """Store stream + norm(branch) of a program's rows."""
    scale = _scale_of(branch_rows, token_mask, eps, K, STEP, EVEN_T)
    for start in tl.range(0, K, STEP):
        k = start + tl.arange(0, STEP)[None, None, None, :]
        branch = _load_x(branch_rows + k, k, token_mask, K, False, EVEN_T)
        stream = _load_x(stream_rows + k, k, token_mask, K, False, EVEN_T)
        gain = load_gain(join_ptr, k, K) if HAS_GAIN else k
        total = _join(branch, stream, scale, gain, offset, HAS_GAIN, CAST_BEFORE_GAIN)
        tl.store(total_rows + k, total, mask=token_mask & (k < K))


@triton.jit(do_not_specialize_on_alignment=["num_tokens"])
def _joined_gemv_kernel(
    branch_ptr,
    join_ptr,
    total_ptr,
    stream_ptr,
    w0_ptr,
    w1_ptr,
    w2_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    norm_ptr,
    out_ptr,
    stride_branch,  # all strides: in units of VEC
    join_eps,
    join_offset,
    num_tokens,
    n0,
    n1,
    n2,
    stride_stream,
    stride_w0,
    stride_w1,
    stride_w2,
    eps,
    norm_offset,
    JOIN_GAIN: tl.constexpr,
    JOIN_CAST: tl.constexpr,
    K: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    HAS_BIAS0: tl.constexpr,
    HAS_BIAS1: tl.constexpr,
    HAS_BIAS2: tl.constexpr,
    NORM: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
    K_WARPS: tl.constexpr,
    VEC: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """total[t] = stream[t] + rsqrt(mean_k branch[t, k]^2 + join_eps) * join_gain * branch[t];

    out[t, n] = epilogue(rsqrt(mean_k total^2 + eps) * sum_k w[n, k] * gain[k] * total[t, k]).
    """
    if PDL:
        gdc_launch_dependents()
    STEP: tl.constexpr = WARPS * 32 * VEC
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None, None, None]
    token_mask = tokens < num_tokens
    branch_rows = branch_ptr + tokens.to(tl.int64) * stride_branch * VEC
    stream_rows = stream_ptr + tokens.to(tl.int64) * stride_stream * VEC
    if tl.program_id(0) == tl.num_programs(0) - 1:
        if PDL:
            gdc_wait()
        _store_total(
            branch_rows,
            stream_rows,
            join_ptr,
            total_ptr + tokens.to(tl.int64) * K,
            token_mask,
            join_eps,
            join_offset,
            K,
            STEP,
            EVEN_T,
            JOIN_GAIN,
            JOIN_CAST,
        )
        return
    block, w_ptr, b_ptr, stride_w, n, column, has_bias, width = locate(
        tl.program_id(0),
        w0_ptr,
        w1_ptr,
        w2_ptr,
        b0_ptr,
        b1_ptr,
        b2_ptr,
        n0,
        n1,
        n2,
        stride_w0,
        stride_w1,
        stride_w2,
        HAS_BIAS0,
        HAS_BIAS1,
        HAS_BIAS2,
        NUM_WEIGHTS,
        GATED,
        ROWS * (WARPS // K_WARPS),
    )
    N_WARPS: tl.constexpr = WARPS // K_WARPS
    BLOCK_N: tl.constexpr = ROWS * N_WARPS
    CHUNK: tl.constexpr = 32 * VEC
    TILE: tl.constexpr = K_WARPS * CHUNKS * CHUNK
    TILES: tl.constexpr = (K + TILE - 1) // TILE

    # Of the weights the last dim spans the threads (warp, lane, element), as in gemv.py.
    r_thread = tl.arange(0, WARPS * CHUNK)[None, None, None, :]
    r_row = tl.arange(0, ROWS)[None, :, None, None]
    r_warp = r_thread // CHUNK
    rows = block * BLOCK_N + r_row * N_WARPS + r_warp // K_WARPS
    row_mask = rows < n
    r_chunk = r_warp % K_WARPS * CHUNKS + tl.arange(0, CHUNKS)[None, None, :, None]
    k = r_chunk * CHUNK + r_thread % CHUNK
    w_ptrs = w_ptr + rows.to(tl.int64) * stride_w * VEC + k
    weight = load_streamed(w_ptrs, k, row_mask, K, EVEN_K, not EVEN_N)
    up_ptrs = w_ptrs
    up = weight
    if GATED:
        up_ptrs = w1_ptr + rows.to(tl.int64) * stride_w1 * VEC + k
        up = load_streamed(up_ptrs, k, row_mask, K, EVEN_K, not EVEN_N)
    # Of a tile of x no element is twice among the threads.
    r_share = tl.arange(0, K_WARPS * CHUNK)[None, None, None, :]
    r_chunk = r_share // CHUNK * CHUNKS + tl.arange(0, CHUNKS)[None, None, :, None]
    x_k = r_chunk * CHUNK + r_share % CHUNK
    gain = x_k
    if HAS_GAIN:
        gain = load_gain(norm_ptr, x_k, K)
    join_gain = x_k
    if JOIN_GAIN:
        join_gain = load_gain(join_ptr, x_k, K)
    HAS_BIAS: tl.constexpr = HAS_BIAS0 or HAS_BIAS1 or HAS_BIAS2
    r_row = tl.arange(0, ROWS)[None, :, None] * N_WARPS + tl.arange(0, N_WARPS)[None, None, :]
    out_rows = block * BLOCK_N + r_row
    bias = load_bias(b_ptr, out_rows, n, has_bias, HAS_BIAS)
    up_bias = load_bias(b1_ptr, out_rows, n, True, GATED and HAS_BIAS1)
    if PDL:
        gdc_wait()

    branch_ptrs = branch_rows + x_k
    stream_ptrs = stream_rows + x_k
    branch = _load_x(branch_ptrs, x_k, token_mask, K, EVEN_K, EVEN_T)
    stream = _load_x(stream_ptrs, x_k, token_mask, K, EVEN_K, EVEN_T)
    # Left to itself the assembler issues these loads when those of the first pass are there.
    tl.debug_barrier()
    join_scale = _scale_of(branch_rows, token_mask, join_eps, K, STEP, EVEN_T)
    squares = tl.zeros([TOKENS, 1, CHUNKS, K_WARPS * CHUNK], tl.float32)
    acc = tl.zeros([TOKENS, ROWS, WARPS * 32], tl.float32)
    acc_up = acc
    for tile in tl.range(0, TILES):
        total = _join(branch, stream, join_scale, join_gain, join_offset, JOIN_GAIN, JOIN_CAST)
        x = total.to(tl.float32)
        if NORM:
            squares += x * x
        if HAS_GAIN:
            x *= gain.to(tl.float32) + norm_offset
        x = x[:, :, :, None, :]
        x = tl.broadcast_to(x, [TOKENS, 1, CHUNKS, N_WARPS, K_WARPS * CHUNK])
        x = tl.reshape(x, [TOKENS, 1, CHUNKS, WARPS * CHUNK])
        # After x, whose barriers would keep both tiles of the weights in registers.
        this = weight
        this_up = up
        k += TILE
        w_ptrs += TILE
        more = row_mask & (tile + 1 < TILES)
        weight = load_streamed(w_ptrs, k, more, K, EVEN_K, True)
        if GATED:
            up_ptrs += TILE
            up = load_streamed(up_ptrs, k, more, K, EVEN_K, True)
        x_k += TILE
        branch_ptrs += TILE
        stream_ptrs += TILE
        branch = _load_x(branch_ptrs, x_k, token_mask, K, False, EVEN_T)
        stream = _load_x(stream_ptrs, x_k, token_mask, K, False, EVEN_T)
        if HAS_GAIN:
            gain = load_gain(norm_ptr, x_k, K)
        if JOIN_GAIN:
            join_gain = load_gain(join_ptr, x_k, K)
        acc += _lane_sums(this.to(tl.float32) * x, WARPS, VEC)
        if GATED:
            acc_up += _lane_sums(this_up.to(tl.float32) * x, WARPS, VEC)

    y = _feature_sums(acc, WARPS, K_WARPS)
    y_up = y
    if GATED:
        y_up = _feature_sums(acc_up, WARPS, K_WARPS)
    if NORM:
        sums = tl.sum(tl.reshape(squares, [TOKENS, 1, TILE]), axis=2)
        scale = tl.rsqrt(sums[:, :, None] / K + eps)
        y *= scale
        y_up *= scale
    out_tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    out_columns = column + out_rows
    finish(
        y,
        y_up,
        bias,
        up_bias,
        0.0,
        out_ptr + out_tokens.to(tl.int64) * width + out_columns,
        (out_tokens < num_tokens) & (out_rows < n),
        HAS_BIAS,
        GATED and HAS_BIAS1,
        False,
        ACTIVATION,
        GATED,
    )
