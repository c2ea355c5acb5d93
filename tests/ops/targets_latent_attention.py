"""Compile targets of latent attention: DeepSeek's widths, MiniCPM3's, odd ones, float32."""

from __future__ import annotations

from collections.abc import Mapping

from targets import Target

_INDICES = {
    name: "*i32" for name in ("block_table_ptr", "slots_ptr", "context_lens_ptr", "cu_seqlens_ptr")
}
_FP32 = {f"{name}_ptr": "*fp32" for name in ("q", "r", "latent_cache", "rope_cache", "out")}


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _shape(heads: int, rank: int, rope: int, block_size: int = 16) -> dict[str, object]:
    return {
        "stride_lcb": block_size * rank,
        "stride_lcs": rank,
        "stride_rcb": block_size * rope,
        "stride_rcs": rope,
        "NUM_HEADS": heads,
        "RANK": rank,
        "ROPE": rope,
        "BLOCK_SIZE": block_size,
        "BLOCK_R": _power(rank),
        "BLOCK_P": _power(rope),
        "PRECISION": "ieee",
    }


def _decode(
    label: str,
    shape: Mapping[str, object],
    tile: tuple[int, int],
    warps: int,
    stages: int,
    capabilities: tuple[int, ...],
    types: Mapping[str, str] | None = None,
    hot: bool = True,
) -> Target:
    return Target(
        "latent_attention.decode_kernel:latent_decode_kernel",
        label=label,
        types={
            **{k: t for k, t in _INDICES.items() if k != "cu_seqlens_ptr"},
            "scale": "fp32",
            "partial_ptr": "*fp32",
            "stats_ptr": "*fp32",
            **(types or {}),
        },
        constants={
            **shape,
            "BLOCK_M": tile[0],
            "BLOCK_N": tile[1],
            "NUM_STAGES": stages,
            "SPLIT": True,
        },
        num_warps=warps,
        capabilities=capabilities,
        hot=hot,
    )


def _prefill(
    label: str,
    shape: Mapping[str, object],
    tile: tuple[int, int],
    warps: int,
    stages: int,
    capabilities: tuple[int, ...],
    types: Mapping[str, str] | None = None,
) -> Target:
    return Target(
        "latent_attention.prefill_kernel:latent_prefill_kernel",
        label=label,
        types={**_INDICES, "scale": "fp32", **(types or {})},
        constants={
            **shape,
            "BLOCK_B": 256,
            "BLOCK_M": tile[0],
            "BLOCK_N": tile[1],
            "NUM_STAGES": stages,
        },
        num_warps=warps,
        capabilities=capabilities,
    )


def _merge(label: str, splits: int) -> Target:
    return Target(
        "latent_attention.decode_kernel:latent_merge_kernel",
        label=label,
        types={
            "slots_ptr": "*i32",
            "context_lens_ptr": "*i32",
            "partial_ptr": "*fp32",
            "stats_ptr": "*fp32",
        },
        constants={
            "NUM_HEADS": 16,
            "RANK": 512,
            "BLOCK_N": 32,
            "BLOCK_S": splits,
            "BLOCK_C": 128,
        },
        num_warps=4,
        hot=True,
    )


def _write(label: str, heads: int, rank: int, half: int, **constants: object) -> Target:
    block_half = 1 << (half - 1).bit_length()
    return Target(
        "latent_attention.write_kernel:latent_cache_write_kernel",
        label=label,
        types={
            "cos_ptr": "*fp32",
            "sin_ptr": "*fp32",
            "slot_mapping_ptr": "*i64",
            "block_table_ptr": "*i32",
            "slots_ptr": "*i32",
            "context_lens_ptr": "*i32",
            "eps": "fp32",
        },
        constants={
            "NUM_HEADS": heads,
            "NOPE": 128,
            "RANK": rank,
            "HALF": half,
            "BLOCK_SIZE": 16,
            "BLOCK_H": min(1 << (heads - 1).bit_length(), max(512 // block_half, 1)),
            "BLOCK_R": 1 << (rank - 1).bit_length(),
            "BLOCK_HALF": block_half,
            "ROTATION": "pairs_to_halves",
            "HAS_MAPPING": False,
            **constants,
        },
        num_warps=2,
        hot=True,
    )


_LITE, _LARGE, _MINI = _shape(16, 512, 64), _shape(128, 512, 64), _shape(40, 256, 32)
_ODD = _shape(12, 96, 24, 8)

TARGETS = [
    _decode("16x512", _LITE, (16, 32), 4, 2, (80, 89, 90, 100)),
    _decode("128x512", _LARGE, (32, 32), 8, 2, (90, 100)),
    _decode("40x256", _MINI, (32, 32), 8, 2, (90, 100)),
    _decode("12x96-odd", _ODD, (16, 32), 4, 2, (89, 90)),
    _decode("40x256-t4", _MINI, (16, 16), 8, 1, (75,), hot=False),
    _decode("16x512-fp32", _LITE, (16, 16), 8, 1, (89, 90), _FP32, hot=False),
    _merge("16", 16),
    _merge("64", 64),
    _prefill("16x512", _LITE, (32, 64), 8, 2, (90, 100)),
    _prefill("128x512", _LARGE, (32, 64), 8, 2, (90, 100)),
    _prefill("40x256", _MINI, (32, 64), 8, 2, (90, 100)),
    _prefill("16x512-large", _LITE, (32, 32), 8, 2, (80,)),
    _prefill("16x512-small", _LITE, (32, 16), 8, 2, (89,)),
    _prefill("40x256-t4", _MINI, (16, 16), 8, 1, (75,)),
    _prefill("16x512-fp32", _LITE, (16, 16), 8, 1, (89, 90), _FP32),
    _write("16x512", 16, 512, 32),
    _write("128x512-mapped", 128, 512, 32, HAS_MAPPING=True, ROTATION="pairs"),
    _write("odd", 12, 96, 12, ROTATION="halves", NOPE=20),
]
