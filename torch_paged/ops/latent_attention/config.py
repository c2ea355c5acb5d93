"""Tile sizes and grid shapes of the latent attention kernels, by device."""

from __future__ import annotations

import dataclasses

import torch

from torch_paged.ops.triton_compat import device_capability


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the decode kernel cuts its work.

    Attributes:
        block_m: heads of a program.
        block_n: tokens of an iteration.
        single_tokens: up to so many tokens are one range, without a merge.
    """

    block_m: int = 16
    block_n: int = 32
    num_warps: int = 4
    num_stages: int = 2
    single_tokens: int = 128
    min_split_tokens: int = 128
    programs_per_sm: int = 1
    max_splits: int = 64


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tile of the prefill kernel: block_m (token, head) pairs by block_n tokens."""

    block_m: int = 16
    block_n: int = 32
    num_warps: int = 4
    num_stages: int = 2


# Small, so that small tests under the interpreter reach several splits.
_INTERPRETED = DecodeConfig(
    block_n=16, single_tokens=32, min_split_tokens=16, num_stages=1, programs_per_sm=2
)


def decode_config(query: torch.Tensor) -> DecodeConfig:
    """Return the decode configuration for latent queries [num_rows, num_heads, rank]."""
    if query.device.type != "cuda":
        return _INTERPRETED
    major, _ = device_capability(query.device.index or 0)
    if query.element_size() == 4:
        return DecodeConfig(block_n=16, num_warps=8, num_stages=1)
    if major < 8:
        _refuse_wide(query)
        return DecodeConfig(block_n=16, num_warps=8, num_stages=1)
    if major in (9, 10) and query.shape[1] > 16:
        return DecodeConfig(block_m=32, num_warps=8)
    return DecodeConfig()


def prefill_config(query: torch.Tensor) -> PrefillConfig:
    """Return the prefill tile for latent queries [num_tokens, num_heads, rank]."""
    if query.device.type != "cuda":
        return PrefillConfig(block_n=16, num_stages=1)
    capability = device_capability(query.device.index or 0)
    if query.element_size() == 4:
        return PrefillConfig(block_n=16, num_warps=8, num_stages=1)
    if capability[0] < 8:
        _refuse_wide(query)
        return PrefillConfig(block_n=16, num_warps=8, num_stages=1)
    if capability[0] in (9, 10):
        return PrefillConfig(32, 64, 8, 2)
    if capability in ((8, 0), (8, 7)):
        return PrefillConfig(32, 32, 8, 2)
    return PrefillConfig(32, 16, 8, 2)  # 100 KiB of shared memory


def _refuse_wide(query: torch.Tensor) -> None:
    """Raise where queries and latents, multiplied in float32, do not fit into 64 KiB."""
    if query.shape[2] > 256:
        raise NotImplementedError(
            f"latents of rank {query.shape[2]} need a GPU of compute capability 8.0 or newer; "
            "older ones take up to 256"
        )


__all__ = ["DecodeConfig", "PrefillConfig", "decode_config", "prefill_config"]
