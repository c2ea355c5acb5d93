"""Norm of the latent, rotation of key and queries, and cache write, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_paged.ops.latent_attention.checks import check_caches, check_place
from torch_paged.ops.latent_attention.reference import latent_cache_write_reference
from torch_paged.ops.latent_attention.write_kernel import latent_cache_write_kernel
from torch_paged.ops.paged_attention.checks import check_slots
from torch_paged.ops.registration import register_op
from torch_paged.ops.triton_compat import triton, use_pdl

#: The names that `rotation` takes.
ROTATIONS = ("pairs", "halves", "pairs_to_halves")
# Pairs of one program's tile of heads: small enough to spread a few decode rows.
_TILE = 512


def _launch_latent_cache_write(
    query: Tensor,
    compressed: Tensor,
    cos: Tensor,
    sin: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    norm_weight: Tensor,
    eps: float,
    rotation: str,
    slot_mapping: Tensor | None = None,
    block_table: Tensor | None = None,
    slots: Tensor | None = None,
    context_lens: Tensor | None = None,
) -> None:
    num_tokens, num_heads, head_dim = query.shape
    if num_tokens == 0:
        return
    rank, half = latent_cache.shape[3], cos.shape[1]
    block_half = triton.next_power_of_2(half)
    block_h = min(triton.next_power_of_2(num_heads), max(_TILE // block_half, 1))
    block_r = triton.next_power_of_2(rank)
    pdl = use_pdl(query)
    extra = {"launch_pdl": True} if pdl else {}
    latent_cache_write_kernel[(num_tokens, 1 + triton.cdiv(num_heads, block_h))](
        query,
        compressed,
        cos,
        sin,
        latent_cache,
        rope_cache,
        norm_weight,
        query if slot_mapping is None else slot_mapping,
        query if block_table is None else block_table,
        query if slots is None else slots,
        query if context_lens is None else context_lens,
        query.stride(0),
        query.stride(1),
        compressed.stride(0),
        0 if block_table is None else block_table.stride(0),
        latent_cache.stride(0),
        latent_cache.stride(2),
        rope_cache.stride(0),
        rope_cache.stride(2),
        eps,
        NUM_HEADS=num_heads,
        NOPE=head_dim - 2 * half,
        RANK=rank,
        HALF=half,
        BLOCK_SIZE=latent_cache.shape[2],
        BLOCK_H=block_h,
        BLOCK_R=block_r,
        BLOCK_HALF=block_half,
        ROTATION=rotation,
        HAS_MAPPING=slot_mapping is not None,
        PDL=pdl,
        num_warps=2,
        **extra,
    )


def _latent_cache_write_fake(
    query: Tensor,
    compressed: Tensor,
    cos: Tensor,
    sin: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    norm_weight: Tensor,
    eps: float,
    rotation: str,
    slot_mapping: Tensor | None = None,
    block_table: Tensor | None = None,
    slots: Tensor | None = None,
    context_lens: Tensor | None = None,
) -> None:
    return None


_latent_cache_write = register_op(
    "latent_cache_write(Tensor(a!) query, Tensor(b!) compressed, Tensor cos, Tensor sin, "
    "Tensor(c!) latent_cache, Tensor(d!) rope_cache, Tensor norm_weight, float eps, "
    "str rotation, Tensor? slot_mapping=None, Tensor? block_table=None, Tensor? slots=None, "
    "Tensor? context_lens=None) -> ()",
    cpu=latent_cache_write_reference,
    cuda=_launch_latent_cache_write,
    fake=_latent_cache_write_fake,
)


def latent_cache_write(
    query: Tensor,
    compressed: Tensor,
    cos: Tensor,
    sin: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    norm_weight: Tensor,
    *,
    eps: float,
    rotation: str,
    slot_mapping: Tensor | None = None,
    block_table: Tensor | None = None,
    slots: Tensor | None = None,
    context_lens: Tensor | None = None,
) -> None:
    """Prepare tokens for latent attention in place, and write them into their blocks.

    The latent is RMS-normalised (Llama's order of casts), its key and the ends of the query heads
    are rotated. Tokens are placed by `slot_mapping`, or as the newest of their rows by the other
    three.

    Args:
        query: [num_tokens, num_heads, nope_dim + rope_dim], floating, written; the last dimension
            contiguous, the other strides free.
        compressed: [num_tokens, rank + rope_dim], latent | key, in the dtype of `query`, written;
            rows contiguous, row stride free.
        cos: fp32 [num_tokens, rope_dim / 2], contiguous.
        sin: like `cos`.
        latent_cache: [num_blocks, 1, block_size, rank], written; takes the latents.
        rope_cache: [num_blocks, 1, block_size, rope_dim], written; takes the keys.
        norm_weight: [rank], contiguous.
        eps: of the norm.
        rotation: what turns: neighbouring "pairs", the two "halves", or pairs whose results are
            kept as halves ("pairs_to_halves").
        slot_mapping: int64 [num_tokens], block * block_size + offset; -1 leaves the cache alone.
        block_table: [num_slots, max_blocks] int32.
        slots: [num_tokens] int32, -1 leaves the cache alone.
        context_lens: [num_slots] int32, index of the row's token.

    Raises:
        ValueError: a shape, dtype, stride or name is not as above.
    """
    if not torch.compiler.is_compiling():
        _check(query, compressed, cos, sin, latent_cache, rope_cache, norm_weight, rotation)
        check_place(query.shape[0], slot_mapping, block_table, slots, context_lens)
        if block_table is not None and slots is not None and context_lens is not None:
            check_slots(block_table, slots, context_lens)
    _latent_cache_write(
        query,
        compressed,
        cos,
        sin,
        latent_cache,
        rope_cache,
        norm_weight,
        eps,
        rotation,
        slot_mapping,
        block_table,
        slots,
        context_lens,
    )


def _check(
    query: Tensor,
    compressed: Tensor,
    cos: Tensor,
    sin: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    norm_weight: Tensor,
    rotation: str,
) -> None:
    check_caches(latent_cache, rope_cache)
    rank, rope_dim = latent_cache.shape[3], rope_cache.shape[3]
    if rotation not in ROTATIONS:
        raise ValueError(f"rotation must be one of {', '.join(ROTATIONS)}, got {rotation!r}")
    if query.dim() != 3 or query.stride(2) != 1 or query.shape[2] < rope_dim:
        raise ValueError(
            f"query must be [num_tokens, num_heads, nope_dim + {rope_dim}] with a contiguous last "
            f"dimension, got {list(query.shape)} with strides {query.stride()}"
        )
    shape = (query.shape[0], rank + rope_dim)
    if compressed.shape != shape or compressed.stride(1) != 1 or compressed.dtype != query.dtype:
        raise ValueError(
            f"compressed must be {query.dtype} {list(shape)} with contiguous rows, got "
            f"{compressed.dtype} {list(compressed.shape)} with strides {compressed.stride()}"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.shape == (query.shape[0], rope_dim // 2) and table.is_contiguous()
        if not fits or table.dtype != torch.float32:
            raise ValueError(
                f"{name} must be contiguous float32 [{query.shape[0]}, {rope_dim // 2}], got "
                f"{table.dtype} {list(table.shape)}"
            )
    if norm_weight.shape != (rank,) or not norm_weight.is_contiguous():
        raise ValueError(f"norm_weight must be contiguous [{rank}], got {list(norm_weight.shape)}")


__all__ = ["ROTATIONS", "latent_cache_write", "latent_cache_write_reference"]
