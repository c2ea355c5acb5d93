"""Compile targets of experts and their router: the shapes of Mixtral-like models and gpt-oss."""

from __future__ import annotations

from targets import Target

_FP32 = {f"{name}_ptr": "*fp32" for name in ("x", "w", "bias", "out")}
_TYPES = {"alpha": "fp32", "limit": "fp32", "stride_be": "i32:16"}
# A matrix [features, k] as a Linear holds it, and one held the other way round.
_K_FIRST = {"stride_wk": 1}
_FEATURES_FIRST = {"stride_wn": 1}
_GATE_UP = {"GATED": True, "INTERLEAVED": False, "ACTIVATION": "silu", "HAS_BIAS": False}
_CLAMPED = {
    "GATED": True,
    "INTERLEAVED": True,
    "ACTIVATION": "clamped_swiglu",
    "HAS_BIAS": True,
}
_DOWN = {"GATED": False, "INTERLEAVED": False, "ACTIVATION": "", "HAS_BIAS": False, "TOP_K": 1}


def _gemv(
    label: str,
    config: tuple[int, int, int, int, int],
    in_features: int,
    *,
    fp32: bool = False,
    hot: bool = True,
    aligned: bool = True,
    **constants: object,
) -> Target:
    rows, block_k, warps, splits, registers = config
    even = in_features % (block_k * splits) == 0
    return Target(
        "experts.gemv:_expert_gemv_kernel",
        label=label,
        types={**_TYPES, "ids_ptr": "*i32", **(_FP32 if fp32 else {})},
        constants={
            "K": in_features,
            "ROWS": rows,
            "BLOCK_K": block_k,
            "SPLITS": splits,
            "EVEN_K": even,
            "EVEN_N": even,
            **constants,
        },
        num_warps=warps,
        num_stages=1,
        options={"maxnreg": registers},
        hot=hot,
        aligned=aligned,
    )


def _tile(
    label: str,
    config: tuple[int, int, int, int, int],
    in_features: int,
    tokens: int,
    *,
    fp32: bool = False,
    hot: bool = True,
    aligned: bool = True,
    capabilities: tuple[int, ...] = (80, 89, 90, 100),
    **constants: object,
) -> Target:
    rows, block_k, warps, splits, stages = config
    even = in_features % (block_k * splits) == 0
    return Target(
        "experts.tile:_expert_tile_kernel",
        label=label,
        types={
            **_TYPES,
            "tiles_ptr": "*i32",
            "order_ptr": "*i32",
            **(_FP32 if fp32 else {}),
            **({} if constants["GATED"] else {"out_ptr": "*fp32"}),
        },
        constants={
            "K": in_features,
            "ROWS": rows,
            "TOKENS": tokens,
            "BLOCK_K": block_k,
            "SPLITS": splits,
            "STAGES": stages,
            "EVEN_K": even,
            "EVEN_N": even,
            "STREAMED": tokens <= 64,
            "PRECISION": "ieee",
            "UPCAST": False,
            **constants,
        },
        num_warps=warps,
        num_stages=1,
        hot=hot,
        aligned=aligned,
        capabilities=capabilities,
    )


def _route(label: str, experts: int, top_k: int, **constants: object) -> Target:
    return Target(
        "route_experts:_route_experts_kernel",
        label=label,
        types={"correction_ptr": "*fp32", "weights_ptr": "*fp32", "ids_ptr": "*i32"}
        | {"scale": "fp32"},
        constants={
            "TOP_K": top_k,
            "SLOTS": 1 << (top_k - 1).bit_length(),
            "NORMALISE": True,
            "HAS_CORRECTION": False,
            "NUM_GROUPS": 1,
            "TOP_GROUPS": 1,
            "GROUP_BEST": 1,
            "BLOCK_G": 1,
            "BLOCK": 1 << (experts - 1).bit_length(),
            **constants,
        },
        num_warps=1,
        hot=True,
    )


def _group(label: str, pairs: int, experts: int, tokens: int, tiles: int) -> Target:
    return Target(
        "experts.group:_group_pairs_kernel",
        label=label,
        types=dict.fromkeys(("ids_ptr", "tiles_ptr", "order_ptr"), "*i32"),
        constants={
            "PAIRS": pairs,
            "MINE": min(pairs, 64),
            "EXPERTS": experts,
            "TILES": tiles,
            "TOKENS": tokens,
            "TILES_EACH": 4,
            "CHUNK": 32,
        },
        num_warps=4,
        hot=True,
    )


TARGETS = [
    _gemv("gate_up-2048", (2, 1024, 4, 1, 128), 2048, TOP_K=2, **_GATE_UP, **_K_FIRST),
    _gemv("down-8192", (4, 1024, 4, 2, 128), 8192, **_DOWN, **_K_FIRST),
    _gemv("gate_up-2880", (32, 64, 4, 1, 128), 2880, TOP_K=4, **_CLAMPED, **_FEATURES_FIRST),
    _gemv("down-2880", (64, 64, 4, 3, 128), 2880, **_DOWN, **_FEATURES_FIRST),
    _gemv("fp32", (2, 512, 4, 1, 128), 2048, fp32=True, TOP_K=2, **_GATE_UP, **_K_FIRST),
    _gemv(
        "odd", (2, 1024, 4, 1, 128), 575, hot=False, aligned=False, TOP_K=8, **_GATE_UP, **_K_FIRST
    ),
    _tile("gate_up-2048", (32, 128, 4, 1, 3), 2048, 16, TOP_K=2, **_GATE_UP, **_K_FIRST),
    _tile("down-8192", (64, 128, 4, 1, 3), 8192, 16, **_DOWN, **_K_FIRST),
    _tile("gate_up-2880", (64, 64, 4, 1, 4), 2880, 16, TOP_K=4, **_CLAMPED, **_FEATURES_FIRST),
    _tile("down-2880", (128, 64, 4, 1, 4), 2880, 32, **_DOWN, **_FEATURES_FIRST),
    _tile(
        "many-2048",
        (64, 64, 8, 1, 3),
        2048,
        128,
        TOP_K=8,
        **_GATE_UP,
        **_K_FIRST,
        capabilities=(80, 90, 100),
    ),
    _tile(
        "many-2880",
        (64, 64, 4, 1, 3),
        2880,
        64,
        TOP_K=4,
        **_CLAMPED,
        **_FEATURES_FIRST,
    ),
    _tile(
        "turing", (16, 32, 4, 1, 2), 2048, 32, TOP_K=2, **_GATE_UP, **_K_FIRST, capabilities=(75,)
    ),
    _tile(
        "fp32", (16, 32, 4, 1, 2), 2048, 32, fp32=True, hot=False, TOP_K=2, **_GATE_UP, **_K_FIRST
    ),
    _tile(
        "odd",
        (32, 128, 4, 1, 3),
        575,
        16,
        hot=False,
        aligned=False,
        TOP_K=2,
        **_GATE_UP,
        **_K_FIRST,
    ),
    Target(
        "experts.combine:_combine_experts_kernel",
        types={"partials_ptr": "*fp32", "ids_ptr": "*i32", "weights_ptr": "*fp32"},
        constants={
            "TOP_K": 4,
            "SPLITS": 2,
            "HAS_BIAS": True,
            "HAS_RESIDUAL": True,
            "BLOCK": 512,
        },
        hot=True,
    ),
    _route("softmax-8", 8, 2, SCORING="softmax"),
    _route("sigmoid-256", 256, 8, SCORING="sigmoid", HAS_CORRECTION=True),
    _route(
        "groups-256",
        256,
        8,
        SCORING="sigmoid",
        HAS_CORRECTION=True,
        NUM_GROUPS=8,
        TOP_GROUPS=4,
        GROUP_BEST=2,
        BLOCK_G=8,
    ),
    _route(
        "groups-160", 160, 6, SCORING="softmax", NUM_GROUPS=8, TOP_GROUPS=3, BLOCK_G=8, BLOCK=256
    ),
    _route("topk_softmax-32", 32, 4, SCORING="topk_softmax", NORMALISE=False),
    _group("gpt-oss-32", 128, 32, 16, 64),
    _group("most", 1024, 128, 32, 256),
]
