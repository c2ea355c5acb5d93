"""Compile targets of the attention kernels: the shapes of common models and the odd ones."""

from __future__ import annotations

from collections.abc import Mapping

from targets import SHARED_LIMITS, Target

_NEWER = tuple(c for c in SHARED_LIMITS if c >= 80)
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
    "PRECISION": "ieee",
}


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _decode(
    label: str,
    *,
    heads: tuple[int, int, int],
    tile: int,
    num_stages: int = 3,
    num_warps: int = 4,
    v_dim: int = 0,
    block_size: int = 16,
    types: Mapping[str, str] | None = None,
    capabilities: tuple[int, ...] = _NEWER,
    **constants: object,
) -> Target:
    num_heads, num_kv_heads, head_dim = heads
    group, v_dim = num_heads // num_kv_heads, v_dim or head_dim
    fp32_pointers = {f"{n}_ptr": "*fp32" for n in ("cos", "sin", "partial", "stats")}
    return Target(
        "paged_attention.decode_kernel:decode_attention_kernel",
        label=label,
        types={
            **{k: v for k, v in _INDEX_TYPES.items() if k != "cu_seqlens_ptr"},
            **_FLOATS,
            **fp32_pointers,
            **(types or {}),
        },
        constants={
            "stride_qh": head_dim,
            "stride_kh": head_dim,
            "stride_vh": v_dim,
            "stride_kcs": head_dim,
            "stride_vcs": v_dim,
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": group,
            "D": head_dim,
            "DV": v_dim,
            "HALF": head_dim // 2,
            "BLOCK_SIZE": block_size,
            "BLOCK_M": _power(group),
            "BLOCK_D": _power(head_dim),
            "BLOCK_DV": _power(v_dim),
            "BLOCK_N": tile,
            "MERGE_TILE": 16 if v_dim <= 128 else 8,
            "MERGE_HEADS": min(4, 1 << (group - 1).bit_length()),
            "NUM_STAGES": num_stages,
            "FUSED": True,
            "SPLIT": True,
            "HAS_Q_NORM": False,
            "HAS_K_NORM": False,
            "CAST_BEFORE_GAIN": True,
            "INTERLEAVED": False,
            "PREFETCH": 0,
            "K_LINES": 1,
            "V_LINES": 1,
            **_FLAGS,
            **constants,
        },
        num_warps=8 if group >= 64 else num_warps,
        hot=True,
        capabilities=capabilities,
    )


def _prefill(
    label: str,
    *,
    heads: tuple[int, int, int],
    tile: tuple[int, int],
    num_warps: int,
    num_stages: int,
    types: Mapping[str, str] | None = None,
    capabilities: tuple[int, ...] = _NEWER,
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
            "stride_kcs": head_dim,
            "stride_vcs": head_dim,
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": num_heads // num_kv_heads,
            "D": head_dim,
            "DV": head_dim,
            "BLOCK_SIZE": 16,
            "BLOCK_B": 8,
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
_NORMED = {"HAS_Q_NORM": True, "HAS_K_NORM": True}

TARGETS = [
    _decode("16x8x128-norm", heads=(16, 8, 128), tile=64, **_NORMED),
    _decode(
        "32x8x128-prefetch",
        heads=(32, 8, 128),
        tile=128,
        num_stages=2,
        num_warps=8,
        capabilities=(90, 100),
        PREFETCH=256,
        K_LINES=2,
        V_LINES=2,
    ),
    _decode("32x8x64", heads=(32, 8, 64), tile=128),
    _decode("32x8x128", heads=(32, 8, 128), tile=64),
    _decode("32x8x128-t4", heads=(32, 8, 128), tile=64, num_stages=1, capabilities=(75,)),
    _decode(
        "8x4x256-softcap-window", heads=(8, 4, 256), tile=32, HAS_WINDOW=True, HAS_SOFTCAP=True
    ),
    _decode("64x8x64-sinks-window", heads=(64, 8, 64), tile=128, HAS_WINDOW=True, HAS_SINKS=True),
    _decode("32x32x80-partial", heads=(32, 32, 80), tile=64, HALF=16),
    _decode("14x2x96-interleaved", heads=(14, 2, 96), tile=64, INTERLEAVED=True),
    _decode("16x16x192-v128", heads=(16, 16, 192), tile=32, v_dim=128),
    _decode("71x1x64-alibi", heads=(71, 1, 64), tile=128, HALF=0, HAS_ALIBI=True),
    _decode("32x8x128-fp32", heads=(32, 8, 128), tile=16, types={**_FP32, **_FP32_NEW}),
    _decode("32x8x128-written", heads=(32, 8, 128), tile=64, HALF=0, FUSED=False),
    _decode("32x8x128-one-split", heads=(32, 8, 128), tile=64, SPLIT=False),
    _prefill("32x8x128", heads=(32, 8, 128), tile=(128, 64), num_warps=8, num_stages=3),
    _prefill("32x8x64", heads=(32, 8, 64), tile=(128, 128), num_warps=8, num_stages=3),
    _prefill("16x8x128-few", heads=(16, 8, 128), tile=(64, 64), num_warps=4, num_stages=3),
    _prefill(
        "8x4x256-softcap-window",
        heads=(8, 4, 256),
        tile=(64, 64),
        num_warps=4,
        num_stages=2,
        capabilities=(80, 90, 100),
        HAS_WINDOW=True,
        HAS_SOFTCAP=True,
    ),
    _prefill(
        "32x8x128-fp32", heads=(32, 8, 128), tile=(32, 32), num_warps=4, num_stages=1, types=_FP32
    ),
    _prefill(
        "32x8x128-t4",
        heads=(32, 8, 128),
        tile=(64, 64),
        num_warps=4,
        num_stages=1,
        capabilities=(75,),
    ),
]
