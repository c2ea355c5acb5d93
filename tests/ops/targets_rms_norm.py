"""Compile targets of rms_norm, add_rms_norm and rms_norm_add."""

from __future__ import annotations

from targets import Target

_FLOATS = {"eps": "fp32", "offset": "fp32"}

TARGETS = [
    Target(
        "rms_norm.kernel:_rms_norm_kernel",
        label="hidden4096",
        types={**_FLOATS, "width": "i32:16"},
        constants={
            "num_heads": 1,
            "ADD_BEFORE": True,
            "ADD_AFTER": False,
            "WIDE_NORM": False,
            "HAS_WEIGHT": True,
            "CAST_BEFORE_GAIN": True,
            "BLOCK": 4096,
        },
        num_warps=8,
        hot=True,
    ),
    Target(
        "rms_norm.kernel:_rms_norm_kernel",
        label="hidden2560-then-add",
        types={**_FLOATS, "width": "i32:16"},
        constants={
            "num_heads": 1,
            "ADD_BEFORE": False,
            "ADD_AFTER": True,
            "WIDE_NORM": False,
            "HAS_WEIGHT": True,
            "CAST_BEFORE_GAIN": False,
            "BLOCK": 4096,
        },
        num_warps=8,
        hot=True,
    ),
    Target(
        "rms_norm.kernel:_rms_norm_kernel",
        label="hidden16384-fp32",
        types={
            **_FLOATS,
            **{f"{name}_ptr": "*fp32" for name in ("x", "residual", "weight", "out", "total")},
        },
        constants={
            "ADD_BEFORE": False,
            "ADD_AFTER": False,
            "WIDE_NORM": False,
            "HAS_WEIGHT": True,
            "CAST_BEFORE_GAIN": False,
            "BLOCK": 16384,
        },
        num_warps=16,
        hot=True,
        aligned=False,
    ),
]
