"""What the kernels of `experts` share: a program's features of an expert, and the gate."""

from __future__ import annotations

from torch_paged.ops.glu import activate
from torch_paged.ops.triton_compat import tl, triton


@triton.jit
def locate_features(
    block,
    num_features,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return the rows of an expert's matrix that a program reads, and which of them exist.

    Gated, these are ROWS of the gate and as many of up: side by side where the matrix holds them
    so, one after the other where all of the gate comes first.
    """
    if GATED:
        r_feature = tl.arange(0, 2 * ROWS)
        if INTERLEAVED:
            feature = 2 * block * ROWS + r_feature
            exists = feature < 2 * num_features
        else:
            column = block * ROWS + r_feature % ROWS
            feature = column + r_feature // ROWS * num_features
            exists = column < num_features
    else:
        feature = block * ROWS + tl.arange(0, ROWS)
        exists = feature < num_features
    return feature, exists


@triton.jit
def load_weights(
    ptrs,
    k,
    exists,
    K: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    STREAMED: tl.constexpr,
):
    """Load a tile [features, k] of an expert's matrix; STREAMED: nobody reads it again."""
    EVICTION: tl.constexpr = "evict_first" if STREAMED else ""
    if EVEN_K and EVEN_N:
        tile = tl.load(ptrs, eviction_policy=EVICTION)
    elif EVEN_K:
        tile = tl.load(ptrs, mask=exists, other=0.0, eviction_policy=EVICTION)
    elif EVEN_N:
        tile = tl.load(ptrs, mask=k < K, other=0.0, eviction_policy=EVICTION)
    else:
        tile = tl.load(ptrs, mask=exists & (k < K), other=0.0, eviction_policy=EVICTION)
    return tile


@triton.jit
def gate(y, alpha, limit, INTERLEAVED: tl.constexpr, ACTIVATION: tl.constexpr):
    """[2 * ROWS, T] sums of gate and up, as `locate_features` orders them -> [ROWS, T]."""
    ROWS: tl.constexpr = y.shape[0] // 2
    TOKENS: tl.constexpr = y.shape[1]
    if INTERLEAVED:
        pairs = tl.permute(tl.reshape(y, [ROWS, 2, TOKENS]), [0, 2, 1])
    else:
        pairs = tl.permute(tl.reshape(y, [2, ROWS, TOKENS]), [1, 2, 0])
    y, up = tl.split(pairs)
    if ACTIVATION == "clamped_swiglu":
        # Comparisons let NaN through.
        y = tl.where(y > limit, limit, y)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        out = y / (1.0 + tl.exp(-alpha * y)) * (up + 1.0)
    else:
        out = activate(y, ACTIVATION) * up
    return out
