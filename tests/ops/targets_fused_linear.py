"""Compile targets of fused_linear and of LoRA: layers of the models that have goals."""

from __future__ import annotations

from dataclasses import replace

from targets import Target

_NEWER = (80, 89, 90, 100)
_FLOATS = {
    **dict.fromkeys(("eps", "norm_offset", "scale0", "scale1", "scale2"), "fp32"),
    "lora_x_ptr": "*fp32",
}
_FP32 = {
    f"{name}_ptr": "*fp32"
    for name in (
        *("x", "w0", "w1", "w2", "b0", "b1", "b2", "norm", "residual", "out"),
        *("u0", "u1", "u2"),
    )
}
_FP32_UPDATES = {f"u{index}_ptr": "*fp32" for index in range(3)}
_LAYER = {
    "NUM_WEIGHTS": 1,
    "HAS_BIAS0": False,
    "HAS_BIAS1": False,
    "HAS_BIAS2": False,
    "NORM": False,
    "HAS_GAIN": False,
    "HAS_RESIDUAL": False,
    "RANK0": 0,
    "RANK1": 0,
    "RANK2": 0,
    "MAX_RANK": 0,
    "AFTER_SHRINK": False,
    "ACTIVATION": "",
    "GATED": False,
    "EVEN_K": True,
    "EVEN_N": True,
}
_NORM = {"NORM": True, "HAS_GAIN": True}
_QKV = {"NUM_WEIGHTS": 3, **_NORM}
_BIASES = {"HAS_BIAS0": True, "HAS_BIAS1": True, "HAS_BIAS2": True}
_QKV_BIASED = {**_QKV, **_BIASES}
_PLAIN_GATED = {"NUM_WEIGHTS": 2, "GATED": True, "ACTIVATION": "silu"}
_GATED = {**_PLAIN_GATED, **_NORM}
_DOWN = {"HAS_RESIDUAL": True}
_LORA = {"RANK0": 16, "MAX_RANK": 16, "AFTER_SHRINK": True}
_LORA_TWO = {**_LORA, "RANK1": 16}
_LORA_THREE = {**_LORA_TWO, "RANK2": 16}
_LORA_WIDE = {**_LORA_THREE, "AFTER_SHRINK": False}
_LORA_LARGE = {"RANK0": 256, "RANK1": 256, "RANK2": 256, "MAX_RANK": 256}
_ODD = {"EVEN_K": False, "EVEN_N": False, "VEC": 1}


def _gemv(
    label: str,
    config: tuple[int, int, int, int, int],
    in_features: int,
    num_tokens: int = 1,
    *,
    fp32: bool = False,
    fp32_updates: bool = False,
    hot: bool = True,
    **constants: object,
) -> Target:
    rows, chunks, warps, k_warps, registers = config
    return Target(
        "fused_linear.gemv:_gemv_kernel",
        label=label,
        types={**_FLOATS, **(_FP32 if fp32 else {}), **(_FP32_UPDATES if fp32_updates else {})},
        constants={
            **_LAYER,
            "K": in_features,
            "TOKENS": num_tokens,
            "ROWS": rows,
            "CHUNKS": chunks,
            "WARPS": warps,
            "K_WARPS": k_warps,
            "VEC": 4 if fp32 else 8,
            "EVEN_T": True,
            "RELEASE_LATE": False,
            **constants,
            "AFTER_SHRINK": False,
        },
        num_warps=warps,
        num_stages=1,
        options={"maxnreg": registers},
        hot=hot,
        aligned="VEC" not in constants,
    )


def _shrink(
    label: str,
    config: tuple[int, int, int, int, int],
    in_features: int,
    num_tokens: int = 1,
    **constants: object,
) -> Target:
    """The GEMV as `lora_shrink` launches it: float32 weights and results beside 16-bit rows."""
    target = _gemv(label, config, in_features, num_tokens, **constants)
    floats = ("w0_ptr", "w1_ptr", "w2_ptr", "out_ptr")
    return replace(target, types={**target.types, **dict.fromkeys(floats, "*fp32")})


def _shrink_norm(label: str, config: tuple[int, int, int, int, int], in_features: int) -> Target:
    rows, chunks, warps, k_warps, registers = config
    return Target(
        "fused_linear.shrink_norm:_shrink_norm_kernel",
        label=label,
        types={
            **dict.fromkeys(("eps", "norm_offset"), "fp32"),
            **dict.fromkeys(("d0_ptr", "d1_ptr", "d2_ptr", "out_ptr"), "*fp32"),
        },
        constants={
            "K": in_features,
            "BLOCK": in_features,
            "NUM_WEIGHTS": 3,
            "HAS_GAIN": True,
            "CAST_BEFORE_GAIN": True,
            "TOKENS": 4,
            "ROWS": rows,
            "CHUNKS": chunks,
            "WARPS": warps,
            "K_WARPS": k_warps,
            "VEC": 8,
            "EVEN_K": True,
            "EVEN_N": True,
            "EVEN_T": True,
        },
        num_warps=warps,
        num_stages=1,
        options={"maxnreg": registers},
        hot=True,
    )


def _joined_gemv(
    label: str,
    config: tuple[int, int, int, int, int],
    in_features: int,
    num_tokens: int = 1,
    *,
    hot: bool = True,
    fp32: bool = False,
    join_cast: bool = False,
    **constants: object,
) -> Target:
    """The GEMV as `joined_linear` launches it."""
    gemv = _gemv(label, config, in_features, num_tokens, fp32=fp32, hot=hot, **constants)
    types = dict.fromkeys(("eps", "norm_offset", "join_eps", "join_offset"), "fp32")
    if fp32:
        others = ("w0", "w1", "w2", "b0", "b1", "b2", "norm", "out")
        names = ("branch", "join", "total", "stream", *others)
        types |= {f"{name}_ptr": "*fp32" for name in names}
    unknown = ("HAS_RESIDUAL", "RANK0", "RANK1", "RANK2", "MAX_RANK", "AFTER_SHRINK")
    kept = {n: v for n, v in gemv.constants.items() if n not in (*unknown, "RELEASE_LATE")}
    step = config[1] * config[3] * 32 * gemv.constants["VEC"]
    kept |= {"EVEN_K": in_features % step == 0, "JOIN_GAIN": True, "JOIN_CAST": join_cast}
    kernel = "fused_linear.joined_gemv:_joined_gemv_kernel"
    return replace(gemv, kernel=kernel, types=types, constants=kept)


def _small_gemm(
    label: str,
    config: tuple[int, int, int, int, int],
    in_features: int,
    num_tokens: int = 8,
    *,
    hot: bool = True,
    **constants: object,
) -> Target:
    rows, chunks, warps, splits, registers = config
    return Target(
        "fused_linear.small_gemm:_small_gemm_kernel",
        label=label,
        types={**_FLOATS, "partials_ptr": "*fp32", "counters_ptr": "*i32"},
        constants={
            **_LAYER,
            "K": in_features,
            "TOKENS": num_tokens,
            "ROWS": rows,
            "CHUNKS": chunks,
            "WARPS": warps,
            "SPLITS": splits,
            "VEC": 8,
            "UPCAST": False,
            **constants,
        },
        num_warps=warps,
        num_stages=1,
        options={"maxnreg": registers},
        hot=hot,
        aligned="VEC" not in constants,
        capabilities=_NEWER,
    )


def _tile_gemm(
    label: str,
    config: tuple[int, int, int, int, int],
    in_features: int,
    num_tokens: int,
    *,
    hot: bool = True,
    **constants: object,
) -> Target:
    rows, block_k, warps, splits, stages = config
    return Target(
        "fused_linear.tile_gemm:_tile_gemm_kernel",
        label=label,
        types={**_FLOATS, "partials_ptr": "*fp32", "counters_ptr": "*i32"},
        constants={
            **_LAYER,
            "K": in_features,
            "TOKENS": num_tokens,
            "ROWS": rows,
            "BLOCK_K": block_k,
            "SPLITS": splits,
            "STAGES": stages,
            "VEC": 8,
            "UPCAST": False,
            **constants,
        },
        num_warps=warps,
        num_stages=1,
        hot=hot,
        aligned="VEC" not in constants,
        # 89 has 99 KiB of shared memory a program.
        capabilities=_NEWER if rows * block_k <= 4096 and num_tokens <= 64 else (80, 90, 100),
    )


def _wide_gemm(
    label: str,
    config: tuple[int, int, int, int, int, int],
    in_features: int,
    *,
    hot: bool = True,
    **constants: object,
) -> Target:
    rows, tokens, block_k, warps, splits, stages = config
    num_weights = constants.get("NUM_WEIGHTS", 1)
    weight = f"tensordesc<half[{rows}, {block_k}]>"
    absent = [f"w{index}_desc" for index in range(3) if index >= num_weights]
    return Target(
        "fused_linear.wide_gemm:_wide_gemm_kernel",
        label=label,
        types={
            **_FLOATS,
            "partials_ptr": "*fp32",
            "counters_ptr": "*i32",
            "x_desc": f"tensordesc<half[{tokens}, {block_k}]>",
            **{f"w{index}_desc": weight for index in range(num_weights)},
        },
        constants={
            **{name: value for name, value in _LAYER.items() if not name.startswith("EVEN")},
            **dict.fromkeys(absent),
            "K": in_features,
            "TOKENS": tokens,
            "ROWS": rows,
            "BLOCK_K": block_k,
            "SPLITS": splits,
            "SHARE": max(rows // (1 << (splits - 1).bit_length()), 16),
            "STAGES": stages,
            "TOGETHER": True,
            "PREFETCH": 512,
            "VEC": 8,
            "UPCAST": False,
            **constants,
        },
        num_warps=warps,
        num_stages=1,
        hot=hot,
        capabilities=(90,),
    )


def _ahead_gemm(
    label: str,
    config: tuple[int, int, int, int],
    in_features: int,
    num_tokens: int,
    **constants: object,
) -> Target:
    rows, block_k, warps, splits = config
    wide = _wide_gemm(
        label, (rows, num_tokens, block_k, warps, splits, 1), in_features, **constants
    )
    constants = {**wide.constants, "PREFETCH": 2 * block_k}
    del constants["STAGES"]
    return replace(wide, kernel="fused_linear.ahead_gemm:_ahead_gemm_kernel", constants=constants)


def _expand(label: str, capabilities: tuple[int, ...], precision: str, rank: int) -> Target:
    return Target(
        "lora_expand:_lora_expand_kernel",
        label=label,
        types={"lora_x_ptr": "*fp32", "update_ptr": "*fp32", "scale": "fp32"},
        constants={"RANK": rank, "TOKENS": 64, "ROWS": 64, "PRECISION": precision},
        num_stages=1,
        hot=True,
        capabilities=capabilities,
    )


TARGETS = [
    _expand("16", _NEWER, "tf32x3", 16),
    _expand("64", _NEWER, "tf32x3", 64),
    _expand("exact", (75, 90), "ieee", 16),
    _gemv("qkv-1024", (2, 2, 8, 1, 128), 1024, **_QKV),
    _gemv("o-2048", (2, 2, 4, 4, 64), 2048, **_DOWN),
    _gemv("gated-1024", (2, 2, 4, 1, 128), 1024, **_GATED),
    _gemv("gated-4096", (1, 4, 4, 4, 80), 4096, **_GATED),
    # 80 registers let three programs share a multiprocessor; Triton 3.9 spills four of them.
    _gemv("down-14336", (2, 4, 8, 8, 80), 14336, hot=False, **_DOWN),
    _gemv("gated-4096-two", (1, 4, 4, 4, 96), 4096, 2, **_GATED),
    _gemv("qkv-fp32", (2, 2, 8, 8, 80), 4096, fp32=True, **_QKV_BIASED),
    _gemv("qkv-fp32-eight", (2, 1, 8, 8, 255), 4096, 8, fp32=True, **_QKV),
    _gemv("odd", (2, 2, 4, 2, 255), 575, 4, hot=False, **_QKV_BIASED, **_ODD, EVEN_T=False),
    _gemv("lora-qkv-1024", (2, 2, 8, 1, 128), 1024, fp32_updates=True, **_QKV, **_LORA_THREE),
    _gemv("lora-o-2048", (2, 2, 4, 4, 64), 2048, **_DOWN, **_LORA),
    _gemv("lora-gated-4096", (1, 4, 4, 4, 80), 4096, **_GATED, **_LORA_TWO, fp32_updates=True),
    _gemv(
        "lora-odd",
        (2, 2, 4, 2, 255),
        575,
        4,
        hot=False,
        **_QKV,
        **_ODD,
        EVEN_T=False,
        RANK0=3,
        RANK1=0,
        RANK2=130,
        MAX_RANK=256,
        fp32_updates=True,
    ),
    _joined_gemv("qkv-4096-bare", (2, 2, 4, 1, 128), 4096, NUM_WEIGHTS=3),
    _joined_gemv("gated-4096-bare", (2, 2, 4, 1, 96), 4096, **_PLAIN_GATED),
    _joined_gemv("gated-2560", (2, 2, 4, 1, 96), 2560, **_GATED),
    _joined_gemv("qkv-2560", (2, 2, 4, 1, 128), 2560, **_QKV),
    # 128 registers let four programs share a multiprocessor; Triton 3.9 spills up to four.
    _joined_gemv("gated-2560-two", (2, 2, 4, 1, 128), 2560, 2, hot=False, **_GATED),
    _joined_gemv("qkv-2560-two", (2, 2, 4, 1, 104), 2560, 2, **_QKV),
    _joined_gemv("qkv-2560-fp32", (2, 2, 4, 1, 128), 2560, fp32=True, join_cast=True, **_QKV),
    _joined_gemv("odd", (2, 2, 8, 2, 104), 575, 2, hot=False, **_QKV_BIASED, **_ODD),
    _shrink("shrink-1024", (1, 1, 4, 4, 80), 1024, **_QKV),
    _shrink("shrink-14336", (1, 4, 8, 8, 80), 14336, RELEASE_LATE=True),
    _shrink("shrink-4096-32", (1, 1, 8, 8, 168), 4096, 4, **_QKV),
    _shrink("shrink-4096-64", (2, 1, 8, 8, 168), 4096, 4, **_QKV),
    _shrink_norm("shrink-1024-32", (1, 1, 4, 4, 168), 1024),
    _shrink_norm("shrink-8192-64", (1, 1, 16, 16, 80), 8192),
    _small_gemm("qkv-1024", (8, 4, 4, 1, 128), 1024, **_QKV),
    _small_gemm("qkv-4096", (16, 2, 4, 1, 128), 4096, **_QKV_BIASED),
    _small_gemm("gated-4096", (16, 1, 4, 1, 128), 4096, **_GATED),
    _small_gemm("o-2048", (8, 8, 8, 1, 128), 2048, **_DOWN),
    _small_gemm("down-14336", (16, 4, 8, 1, 128), 14336, **_DOWN),
    _small_gemm("down-14336-split", (16, 2, 4, 4, 128), 14336, 16, **_DOWN),
    _small_gemm("odd", (16, 1, 4, 1, 255), 575, 64, hot=False, **_QKV_BIASED, **_ODD),
    _tile_gemm("qkv-4096-32", (64, 64, 4, 4, 4), 4096, 32, **_QKV_BIASED),
    _tile_gemm("gated-4096-64", (64, 64, 4, 1, 4), 4096, 64, **_GATED),
    _tile_gemm("head-4096-16", (128, 64, 4, 1, 4), 4096, 16, **_NORM),
    _tile_gemm("down-14336-64", (64, 128, 4, 4, 3), 14336, 64, **_DOWN),
    _tile_gemm("qkv-1024-32-one-tile", (32, 512, 8, 2, 1), 1024, 32, **_QKV),
    _tile_gemm("gated-1024-128", (64, 64, 8, 2, 4), 1024, 128, **_GATED),
    _small_gemm("lora-gated-4096", (16, 1, 4, 1, 128), 4096, **_GATED, **_LORA_TWO),
    _small_gemm("lora-down-14336", (16, 4, 8, 1, 128), 14336, **_DOWN, **_LORA),
    _tile_gemm("lora-qkv-4096-32", (64, 64, 4, 4, 4), 4096, 32, **_QKV, **_LORA_THREE),
    _tile_gemm("lora-256-qkv-4096", (128, 64, 4, 4, 4), 4096, 64, **_QKV, **_LORA_LARGE),
    _tile_gemm("lora-gated-4096-64", (64, 64, 4, 1, 4), 4096, 64, **_GATED, **_LORA_TWO),
    _wide_gemm("qkv-4096", (128, 128, 64, 8, 2, 6), 4096, NUM_WEIGHTS=3),
    _wide_gemm("gated-4096", (128, 128, 64, 8, 1, 4), 4096, **_PLAIN_GATED),
    _wide_gemm("gated-1024", (64, 128, 64, 8, 2, 6), 1024, **_PLAIN_GATED),
    _wide_gemm("down-14336", (128, 128, 64, 8, 4, 6), 14336, **_DOWN),
    _wide_gemm("down-14336-256", (64, 256, 64, 8, 4, 5), 14336, **_DOWN),
    _wide_gemm("down-14336-large", (256, 128, 64, 8, 8, 4), 14336, **_DOWN),
    _wide_gemm("gated-4096-256", (64, 256, 64, 8, 1, 4), 4096, **_PLAIN_GATED),
    _wide_gemm("head-4096", (256, 128, 64, 8, 1, 4), 4096),
    _wide_gemm("lora-qkv", (128, 128, 64, 8, 1, 6), 4096, NUM_WEIGHTS=3, **_LORA_WIDE),
    _wide_gemm("qkv-1024-16", (64, 16, 64, 4, 1, 6), 1024, NUM_WEIGHTS=3),
    _wide_gemm("qkv-1024-32", (64, 32, 128, 4, 2, 4), 1024, NUM_WEIGHTS=3, PREFETCH=1024),
    _wide_gemm("down-14336-32", (256, 32, 64, 8, 7, 5), 14336, **_DOWN),
    _wide_gemm("gated-4096-32", (128, 32, 64, 8, 1, 5), 4096, **_PLAIN_GATED),
    _ahead_gemm("qkv-1024-32", (64, 512, 4, 2), 1024, 32, **_QKV),
    _ahead_gemm("o-2048-128", (64, 512, 8, 4), 2048, 128, **_DOWN),
    _ahead_gemm("gated-1024-32", (64, 512, 8, 2), 1024, 32, **_GATED),
    _ahead_gemm("qkv-2048-64", (128, 512, 8, 4), 2048, 64, **_QKV_BIASED),
    _ahead_gemm("down-3072-64", (128, 512, 8, 6), 3072, 64, **_DOWN),
    _ahead_gemm("o-2048-16", (64, 256, 4, 8), 2048, 16, **_DOWN),
    _ahead_gemm("lora-qkv-32", (64, 512, 4, 2), 1024, 32, **_QKV, **_LORA_WIDE),
    _ahead_gemm("lora-o-128", (64, 512, 8, 4), 2048, 128, **_DOWN, RANK0=16, MAX_RANK=16),
    _ahead_gemm("lora-256-o-128", (64, 512, 8, 4), 2048, 128, **_DOWN, RANK0=256, MAX_RANK=256),
    _ahead_gemm("odd", (64, 512, 4, 2), 575, 32, **_QKV_BIASED, VEC=1),
    _wide_gemm("odd", (64, 128, 64, 8, 2, 3), 575, NUM_WEIGHTS=3, **_BIASES, VEC=1),
    _tile_gemm("odd", (16, 32, 4, 1, 3), 575, 16, hot=False, **_QKV_BIASED, **_ODD),
]
