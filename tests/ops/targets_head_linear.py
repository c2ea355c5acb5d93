"""Compile targets of head_linear: into the space of latents, and out of it."""

from __future__ import annotations

from targets import Target


def _row(label: str, heads: int, dims: tuple[int, int], tokens: int, rows: bool) -> Target:
    in_dim, out_dim = dims
    block_k = max(16, 1 << (in_dim - 1).bit_length())
    return Target(
        "head_linear:_head_linear_kernel",
        label=label,
        constants={
            # Rows of the matrix are contiguous on the way in, columns on the way out.
            "stride_wk": out_dim if rows else 1,
            "stride_wn": 1 if rows else in_dim,
            "NUM_HEADS": heads,
            "IN_DIM": in_dim,
            "OUT_DIM": out_dim,
            "BLOCK_T": tokens,
            "BLOCK_K": block_k,
            "BLOCK_N": max(16, 8192 // block_k),
            "PRECISION": "ieee",
        },
        num_warps=4,
        hot=True,
        capabilities=(80, 89, 90, 100),
    )


TARGETS = [
    _row("in-16", 16, (128, 512), 16, True),
    _row("out-16", 16, (512, 128), 16, False),
    _row("in-32", 128, (128, 512), 32, True),
    _row("out-32", 128, (512, 128), 32, False),
    _row("odd", 12, (20, 96), 16, True),
]
