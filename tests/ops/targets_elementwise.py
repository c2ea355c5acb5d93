"""Compile targets of glu, embed, the rotary tables and copy_blocks."""

from __future__ import annotations

from targets import Target

TARGETS = [
    *(
        Target(
            "glu:_glu_kernel",
            label=activation,
            types={"width": "i32:16"},
            constants={"ACTIVATION": activation, "HAS_UP": True, "BLOCK": 1024},
            hot=True,
        )
        for activation in ("silu", "gelu", "gelu_tanh", "quick_gelu")
    ),
    *(
        Target(
            "glu:_glu_kernel",
            label=f"{activation}-alone",
            constants={"ACTIVATION": activation, "HAS_UP": False, "BLOCK": 1024},
            aligned=False,
        )
        for activation in ("relu", "relu2", "sigmoid")
    ),
    Target(
        "embed:_embed_kernel",
        label="slots",
        types={"ids_ptr": "*i64", "slots_ptr": "*i32", "scale": "fp32", "width": "i32:16"},
        constants={"HAS_SLOTS": True, "BLOCK": 1024},
        hot=True,
    ),
    Target(
        "embed:_embed_kernel",
        label="ids",
        types={"ids_ptr": "*i64", "slots_ptr": "*i64", "scale": "fp32"},
        constants={"HAS_SLOTS": False, "BLOCK": 1024},
    ),
    *(
        Target(
            "rotary_by_span:_rotary_by_span_kernel",
            label="longrope" if has_long else "dynamic",
            types={
                **{f"{name}_ptr": "*i32" for name in ("positions", "slots", "leads", "floors")},
                **{f"{name}_ptr": "*fp32" for name in ("inv_freq", "long", "cos", "sin")},
                **dict.fromkeys(("base", "factor", "exponent", "scaling"), "fp32"),
            },
            constants={
                "HAS_SLOTS": True,
                "HAS_LEADS": True,
                "HAS_LONG": has_long,
                "EXACT": True,
                "BLOCK": 64,
            },
            num_warps=1,
            hot=True,
        )
        for has_long in (False, True)
    ),
    Target(
        "rotary_table:_rotary_table_kernel",
        label="slots",
        types={
            "positions_ptr": "*i32",
            "slots_ptr": "*i32",
            "inv_freq_ptr": "*fp32",
            "cos_ptr": "*fp32",
            "sin_ptr": "*fp32",
            "scaling": "fp32",
        },
        constants={"HAS_SLOTS": True, "EXACT": True, "BLOCK": 64},
        num_warps=1,
    ),
    Target(
        "rotary_table:_rotary_table_kernel",
        label="positions",
        types={
            "positions_ptr": "*i64",
            "slots_ptr": "*i64",
            "inv_freq_ptr": "*fp32",
            "cos_ptr": "*fp32",
            "sin_ptr": "*fp32",
            "scaling": "fp32",
        },
        constants={"HAS_SLOTS": False, "EXACT": True, "BLOCK": 32},
        num_warps=1,
    ),
    Target(
        "copy_blocks:_copy_blocks_kernel",
        types={"src_ptr": "*i64", "dst_ptr": "*i64", "block_numel": "i32:16"},
        constants={"BLOCK": 2048},
        hot=True,
    ),
]
