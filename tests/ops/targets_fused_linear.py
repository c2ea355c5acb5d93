"""Compile targets of fused_linear: the layers of the models that the goals are stated for."""

from __future__ import annotations

from targets import Target

_NEWER = (80, 89, 90, 100)
_FLOATS = {"eps": "fp32", "norm_offset": "fp32"}
_FP32 = {
    f"{name}_ptr": "*fp32"
    for name in ("x", "w0", "w1", "w2", "b0", "b1", "b2", "norm", "residual", "out")
}
_LAYER = {
    "NUM_WEIGHTS": 1,
    "HAS_BIAS0": False,
    "HAS_BIAS1": False,
    "HAS_BIAS2": False,
    "NORM": False,
    "HAS_GAIN": False,
    "HAS_RESIDUAL": False,
    "ACTIVATION": "",
    "GATED": False,
    "EVEN_K": True,
    "EVEN_N": True,
}
_NORM = {"NORM": True, "HAS_GAIN": True}
_QKV = {"NUM_WEIGHTS": 3, **_NORM}
_QKV_BIASED = {**_QKV, "HAS_BIAS0": True, "HAS_BIAS1": True, "HAS_BIAS2": True}
_GATED = {"NUM_WEIGHTS": 2, "GATED": True, "ACTIVATION": "silu", **_NORM}
_DOWN = {"HAS_RESIDUAL": True}
_ODD = {"EVEN_K": False, "EVEN_N": False, "VEC": 1}


def _gemv(
    label: str,
    config: tuple[int, int, int, int, int],
    in_features: int,
    num_tokens: int = 1,
    *,
    fp32: bool = False,
    hot: bool = True,
    **constants: object,
) -> Target:
    rows, chunks, warps, k_warps, registers = config
    return Target(
        "fused_linear.gemv:_gemv_kernel",
        label=label,
        types={**_FLOATS, **(_FP32 if fp32 else {})},
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
            **constants,
        },
        num_warps=warps,
        num_stages=1,
        options={"maxnreg": registers},
        hot=hot,
        aligned="VEC" not in constants,
    )


def _small_gemm(
    label: str,
    config: tuple[int, int, int, int],
    in_features: int,
    num_tokens: int = 8,
    *,
    hot: bool = True,
    **constants: object,
) -> Target:
    rows, chunks, warps, splits = config
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
        options={"maxnreg": 128 if num_tokens == 8 else 255},
        hot=hot,
        aligned="VEC" not in constants,
        capabilities=_NEWER,
    )


TARGETS = [
    _gemv("qkv-1024", (2, 4, 8), 1024, **_QKV),
    _gemv("o-2048", (1, 8, 8), 2048, **_DOWN),
    _gemv("gated-1024", (1, 4, 8), 1024, **_GATED),
    _gemv("gated-4096-two", (1, 2, 4), 4096, 2, **_GATED),
    _gemv("qkv-fp32", (2, 4, 8), 4096, fp32=True, **_QKV_BIASED),
    _gemv("qkv-fp32-eight", (2, 2, 8), 4096, 8, fp32=True, **_QKV),
    _gemv("odd", (2, 2, 4), 575, 4, hot=False, **_QKV_BIASED, **{**_ODD, "EVEN_T": False}),
    _small_gemm("qkv-1024", (16, 4, 8, 1), 1024, **_QKV),
    _small_gemm("qkv-4096", (16, 2, 8, 1), 4096, **_QKV_BIASED),
    _small_gemm("gated-4096", (8, 2, 8, 1), 4096, **_GATED),
    _small_gemm("down-14336", (16, 4, 8, 1), 14336, **_DOWN),
    _small_gemm("down-14336-split", (16, 4, 8, 4), 14336, 16, **_DOWN),
    _small_gemm("gated-4096-32", (8, 2, 8, 1), 4096, 32, **_GATED),
    _small_gemm("qkv-4096-64", (16, 1, 8, 2), 4096, 64, **_QKV),
    _small_gemm("odd", (16, 1, 4, 1), 575, 64, hot=False, **_QKV_BIASED, **_ODD),
]
