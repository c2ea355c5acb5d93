"""Compile targets of the attention kernels: the shapes of common models and the odd ones."""

from __future__ import annotations

from collections.abc import Mapping

from targets import Target

_INDEX_TYPES = {
    name: "*i32"
    for name in (
        "block_table_ptr",
        "slots_ptr",
        "context_lens_ptr",
        "counters_ptr",
        "cu_seqlens_ptr",
    )
}
_FLOATS = {"scale": "fp32", "softcap": "fp32", "eps": "fp32", "norm_offset": "fp32"}
_FLAGS = {
    "HAS_WINDOW": False,
    "HAS_SOFTCAP": False,
    "HAS_SINKS": False,
    "HAS_ALIBI": False,
    "ALIBI_ROUNDED": False,
    "PRECISION": "ieee",
}


# Exact float32 products and wide heads are never cut so; of the others, these stand for all.
_SHORT = ("16x8x128-norm", "32x8x64", "32x8x128", "64x8x64-sinks")

# Of "many" these may spill, and have the tiles of one row that stays and the flags of another.
_ALIKE = ("12x12x64-unrotated", "64x64x64-rounded-alibi")


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _decode(
    label: str,
    *,
    heads: tuple[int, int, int],
    v_dim: int = 0,
    block_size: int = 16,
    element_size: int = 2,
    types: Mapping[str, str] | None = None,
    hot: bool = True,
    **constants: object,
) -> list[Target]:
    """Return a row for each configuration in config.py, cut as decode_launch.py cuts it."""
    rows = []
    for name, capabilities, tile_bytes, warps, stages, prefetch in (
        ("short", (90, 100), 65536, 8, 1, 0),
        ("short_wide", (90, 100), 16384, 8, 1, 0),
        ("few", (90, 100), 32768, 8, 3, 256),
        ("several", (90, 100), 32768, 8, 2, 0),
        ("many", (90, 100), 8192, 4, 3, 0),
        ("most", (90, 100), 8192, 2, 3, 0),
        ("one_wave", (90, 100), 4096, 2, 3, 0),
        ("small", (80, 89), 16384, 4, 2, 0),
        ("t4", (75,), 4096, 4, 1, 0),
    ):
        alike = name == "one_wave"
        if (alike or name in ("short", "several", "most")) and label not in _SHORT:
            continue
        if name == "many" and label in _ALIKE:
            continue
        num_heads, num_kv_heads, head_dim = heads
        group, v = num_heads // num_kv_heads, v_dim or head_dim
        if name == "short_wide" and (head_dim <= 192 or element_size != 2):
            continue
        if name == "many" and head_dim > 128:
            tile_bytes = 16384
        early = name in ("short", "several") and element_size == 2 and head_dim <= 192
        early = early or alike or name == "short_wide"
        power = 1 << (group - 1).bit_length()
        block_m, block_d, block_dv = max(16, power), _power(head_dim), _power(v)
        num_warps = warps if block_m < 64 else 8
        tile = tile_bytes // (max(block_d, block_dv) * element_size)
        tile = min(tile if element_size == 2 else tile // 2, 512 * num_warps // block_m)
        shape = {
            "stride_qh": head_dim,
            "stride_kh": head_dim,
            "stride_vh": v,
            "stride_kcb": num_kv_heads * block_size * head_dim,
            "stride_kch": block_size * head_dim,
            "stride_kcs": head_dim,
            "stride_vcb": num_kv_heads * block_size * v,
            "stride_vch": block_size * v,
            "stride_vcs": v,
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": group,
            "D": head_dim,
            "DV": v,
            "HALF": head_dim // 2,
            "BLOCK_SIZE": block_size,
            "ROWS": max(power, min(num_warps, block_m)),
            "BLOCK_M": block_m,
            "BLOCK_D": block_d,
            "BLOCK_DV": block_dv,
            "BLOCK_N": max(tile, block_size, 16),
            "MERGE_HEADS": min(power, 8),
            "NUM_STAGES": stages,
            "FUSED": True,
            "SPLIT": not alike and name not in ("several", "many", "most"),
            "HAS_Q_NORM": False,
            "HAS_K_NORM": False,
            "CAST_BEFORE_GAIN": True,
            "INTERLEAVED": False,
            "EARLY": early and constants.get("FUSED", True),
            "HEADS_FIRST": name in ("many", "most"),
            "PREFETCH": prefetch,
            "K_LINES": 1 << (max(head_dim * element_size // 128, 1).bit_length() - 1),
            "V_LINES": 1 << (max(v * element_size // 128, 1).bit_length() - 1),
        }
        pointers = {f"{n}_ptr": "*fp32" for n in ("cos", "sin", "partial", "stats")}
        indices = {k: t for k, t in _INDEX_TYPES.items() if k != "cu_seqlens_ptr"}
        rows.append(
            Target(
                "paged_attention.decode_kernel:decode_attention_kernel",
                label=f"{label}-{name}",
                types={**indices, **_FLOATS, **pointers, **(types or {})},
                constants={**_FLAGS, **shape, **constants},
                num_warps=num_warps,
                hot=hot and name != "t4",
                capabilities=capabilities,
                options={"maxnreg": 128} if alike else {},
            )
        )
    return rows


def _prefill(
    label: str,
    *,
    heads: tuple[int, int, int],
    tile: tuple[int, int],
    num_warps: int,
    num_stages: int,
    capabilities: tuple[int, ...],
    types: Mapping[str, str] | None = None,
    **constants: object,
) -> Target:
    num_heads, num_kv_heads, head_dim = heads
    return Target(
        "paged_attention.prefill_kernel:prefill_attention_kernel",
        label=label,
        types={
            **{k: v for k, v in _INDEX_TYPES.items() if k != "counters_ptr"},
            "scale": "fp32",
            "softcap": "fp32",
            **(types or {}),
        },
        constants={
            "stride_qh": head_dim,
            **{f"stride_{x}cb": num_kv_heads * 16 * head_dim for x in "kv"},
            **{f"stride_{x}ch": 16 * head_dim for x in "kv"},
            **{f"stride_{x}cs": head_dim for x in "kv"},
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": num_heads // num_kv_heads,
            "D": head_dim,
            "DV": head_dim,
            "BLOCK_SIZE": 16,
            "BLOCK_B": 256,
            "BLOCK_M": tile[0],
            "BLOCK_D": _power(head_dim),
            "BLOCK_DV": _power(head_dim),
            "BLOCK_N": tile[1],
            "NUM_STAGES": num_stages,
            **_FLAGS,
            **constants,
        },
        num_warps=num_warps,
        capabilities=capabilities,
    )


_FP32 = {f"{name}_ptr": "*fp32" for name in ("q", "k_cache", "v_cache", "out")}
_FP32_NEW = {"k_ptr": "*fp32", "v_ptr": "*fp32"}
_GEMMA = {"HAS_WINDOW": True, "HAS_SOFTCAP": True}
_LARGE = (80, 90, 100)

TARGETS = [
    *_decode("16x8x128-norm", heads=(16, 8, 128), HAS_Q_NORM=True, HAS_K_NORM=True),
    *_decode("32x8x64", heads=(32, 8, 64)),
    *_decode("32x8x128", heads=(32, 8, 128)),
    *_decode("32x8x128-written", heads=(32, 8, 128), HALF=0, FUSED=False),
    *_decode("8x4x256-gemma", heads=(8, 4, 256), **_GEMMA),
    *_decode("64x8x64-sinks", heads=(64, 8, 64), HAS_WINDOW=True, HAS_SINKS=True),
    # Triton 3.9 leaves 8 bytes of stack on sm_90 here, Triton 3.6 none.
    *_decode("32x32x80-partial", heads=(32, 32, 80), HALF=16, hot=False),
    *_decode("14x2x96-interleaved", heads=(14, 2, 96), INTERLEAVED=True),
    *_decode("16x16x192-v128", heads=(16, 16, 192), v_dim=128),
    *_decode("71x1x64-alibi", heads=(71, 1, 64), HALF=0, HAS_ALIBI=True, hot=False),
    *_decode("32x32x128-alibi", heads=(32, 32, 128), HALF=0, HAS_ALIBI=True),
    # Triton 3.9 leaves 8 bytes of stack on sm_89 here, Triton 3.6 none.
    *_decode(
        "64x64x64-rounded-alibi",
        heads=(64, 64, 64),
        HALF=0,
        HAS_ALIBI=True,
        ALIBI_ROUNDED=True,
        types={"slopes_ptr": "*bf16"},
        hot=False,
    ),
    *_decode("12x12x64-unrotated", heads=(12, 12, 64), HALF=0, hot=False),
    *_decode("32x8x128-fp32", heads=(32, 8, 128), element_size=4, types={**_FP32, **_FP32_NEW}),
    _prefill(
        "32x8x128-long",
        heads=(32, 8, 128),
        tile=(128, 128),
        num_warps=8,
        num_stages=2,
        capabilities=(90, 100),
    ),
    _prefill(
        "32x8x128",
        heads=(32, 8, 128),
        tile=(64, 64),
        num_warps=4,
        num_stages=3,
        capabilities=_LARGE,
    ),
    _prefill(
        "32x8x64", heads=(32, 8, 64), tile=(64, 64), num_warps=4, num_stages=3, capabilities=_LARGE
    ),
    _prefill(
        "32x32x128-alibi",
        heads=(32, 32, 128),
        tile=(64, 64),
        num_warps=4,
        num_stages=3,
        capabilities=_LARGE,
        HAS_ALIBI=True,
    ),
    _prefill(
        "64x64x64-rounded-alibi",
        heads=(64, 64, 64),
        tile=(64, 64),
        num_warps=4,
        num_stages=3,
        capabilities=_LARGE,
        types={"slopes_ptr": "*bf16"},
        HAS_ALIBI=True,
        ALIBI_ROUNDED=True,
    ),
    _prefill(
        "32x8x128-small",
        heads=(32, 8, 128),
        tile=(64, 64),
        num_warps=4,
        num_stages=2,
        capabilities=(89,),
    ),
    _prefill(
        "32x8x128-t4",
        heads=(32, 8, 128),
        tile=(32, 16),
        num_warps=4,
        num_stages=1,
        capabilities=(75,),
    ),
    _prefill(
        "8x4x256-gemma-long",
        heads=(8, 4, 256),
        tile=(128, 64),
        num_warps=8,
        num_stages=2,
        capabilities=(90, 100),
        **_GEMMA,
    ),
    _prefill(
        "8x4x256-gemma",
        heads=(8, 4, 256),
        tile=(64, 64),
        num_warps=8,
        num_stages=2,
        capabilities=_LARGE,
        **_GEMMA,
    ),
    _prefill(
        "8x4x256-gemma-small",
        heads=(8, 4, 256),
        tile=(64, 32),
        num_warps=4,
        num_stages=1,
        capabilities=(89,),
        **_GEMMA,
    ),
    _prefill(
        "8x4x256-gemma-t4",
        heads=(8, 4, 256),
        tile=(16, 16),
        num_warps=4,
        num_stages=1,
        capabilities=(75,),
        **_GEMMA,
    ),
    _prefill(
        "32x8x128-fp32",
        heads=(32, 8, 128),
        tile=(32, 32),
        num_warps=8,
        num_stages=1,
        capabilities=(75, *_LARGE),
        types=_FP32,
    ),
]
