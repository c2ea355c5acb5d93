"""Compile targets of rotary_cache_write."""

from __future__ import annotations

from targets import Target

_TYPES = {
    "cos_ptr": "*fp32",
    "sin_ptr": "*fp32",
    "slot_mapping_ptr": "*i64",
    "eps": "fp32",
    "norm_offset": "fp32",
}


def _row(label: str, num_warps: int, **constants: object) -> Target:
    defaults = {
        "HEAD_DIM": 128,
        "VALUE_DIM": 128,
        "BLOCK_SIZE": 16,
        "HALF": 64,
        "HAS_Q_NORM": False,
        "HAS_K_NORM": False,
        "CAST_BEFORE_GAIN": True,
        "INTERLEAVED": False,
        "FULL_WIDTH": False,
        "BLOCK_HQ": 8,
        "BLOCK_HKV": 8,
        "BLOCK_HALF": 64,
        "BLOCK_PASS": 1,
        "BLOCK_DV": 128,
    }
    return Target(
        "rotary_cache_write.kernel:_rotary_cache_write_kernel",
        label=label,
        types=_TYPES,
        constants=defaults | constants,
        num_warps=num_warps,
        hot=True,
    )


TARGETS = [
    _row("llama", 2),
    _row("qwen3", 2, HAS_Q_NORM=True, HAS_K_NORM=True),
    _row("olmo2", 16, HAS_Q_NORM=True, HAS_K_NORM=True, FULL_WIDTH=True, BLOCK_HQ=64),
    _row("glm-partial-interleaved", 2, INTERLEAVED=True, HALF=32, BLOCK_HALF=32, BLOCK_PASS=64),
    _row(
        "no-rope-odd-head",
        2,
        HALF=0,
        BLOCK_HALF=1,
        HEAD_DIM=80,
        BLOCK_PASS=128,
        VALUE_DIM=80,
        HAS_Q_NORM=True,
    ),
]
