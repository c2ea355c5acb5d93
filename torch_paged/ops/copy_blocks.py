"""Copy of whole KV blocks inside one cache, for copy-on-write.

    cache[dst[i]] = cache[src[i]]

Pairs run in no order: a block must not be a destination twice, nor a source and a destination.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_paged.ops.registration import register_op
from torch_paged.ops.triton_compat import (
    gdc_wait,
    tl,
    triton,
    use_pdl,
)

__all__ = ["copy_blocks", "copy_blocks_reference"]

_BLOCK = 2048


def copy_blocks_reference(cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy the blocks with torch, in place."""
    cache.index_copy_(0, dst, cache.index_select(0, src))


@triton.jit
def _copy_blocks_kernel(
    cache_ptr,
    src_ptr,
    dst_ptr,
    stride_cb,
    block_numel,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """cache[dst[pair]] = cache[src[pair]] over BLOCK elements of one pair."""
    pair = tl.program_id(0).to(tl.int64)
    elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = elements < block_numel
    if PDL:
        # Successors start when this kernel is done: attention reads blocks before it waits.
        gdc_wait()
    src = tl.load(src_ptr + pair).to(tl.int64)
    dst = tl.load(dst_ptr + pair).to(tl.int64)
    values = tl.load(cache_ptr + src * stride_cb + elements, mask=mask, other=0.0)
    tl.store(cache_ptr + dst * stride_cb + elements, values, mask=mask)


def _launch_copy_blocks(cache: Tensor, src: Tensor, dst: Tensor) -> None:
    num_pairs = src.shape[0]
    block_numel = cache.shape[1:].numel()
    if num_pairs == 0 or block_numel == 0:
        return
    pdl = use_pdl(cache)
    extra = {"launch_pdl": True} if pdl else {}
    _copy_blocks_kernel[(num_pairs, triton.cdiv(block_numel, _BLOCK))](
        cache,
        src,
        dst,
        cache.stride(0),
        block_numel,
        BLOCK=_BLOCK,
        PDL=pdl,
        num_warps=4,
        **extra,
    )


def _copy_blocks_fake(cache: Tensor, src: Tensor, dst: Tensor) -> None:
    return None


_COPY_BLOCKS = register_op(
    "copy_blocks(Tensor(a!) cache, Tensor src, Tensor dst) -> ()",
    cpu=copy_blocks_reference,
    cuda=_launch_copy_blocks,
    fake=_copy_blocks_fake,
)


def copy_blocks(cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy blocks `src` of `cache` over blocks `dst`, bit for bit.

    Args:
        cache: [num_blocks, ...], written; each block contiguous, the block stride free.
        src: int64 [num_pairs], contiguous, ids below num_blocks (not checked on CUDA).
        dst: like `src`; no id twice and none that is in `src`.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    if not torch.compiler.is_compiling():
        _check(cache, src, dst)
    _COPY_BLOCKS(cache, src, dst)


def _check(cache: Tensor, src: Tensor, dst: Tensor) -> None:
    if cache.dim() < 2 or (cache.shape[0] > 0 and not cache[0].is_contiguous()):
        raise ValueError(
            f"cache must be [num_blocks, ...] with contiguous blocks, got {list(cache.shape)} "
            f"with strides {cache.stride()}"
        )
    for name, ids in (("src", src), ("dst", dst)):
        if ids.dtype != torch.int64 or ids.shape != src.shape or ids.dim() != 1:
            raise ValueError(
                f"{name} must be int64 [num_pairs], as many as in src, got {ids.dtype} "
                f"{list(ids.shape)}"
            )
        if not ids.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {ids.stride()}")
