"""Small arguments of every op's public function, each value telling of its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_paged.ops.fused_linear import NUM_COUNTERS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def _ints(*values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def _longs(*values: Any) -> Tensor:
    return _ints(*values, dtype=torch.int64)


def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=DEVICE)


@dataclass
class Case:
    """Arguments of an op's public function.

    Attributes:
        takes: arguments that callers have as views, and that are not refused.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    takes: tuple[str, ...] = ()


SLOTS = _ints(2, 0, 3)
# Of 4 slots, each with a value of its own, so that a neighbour's shows.
COUNTS = _ints(3, 5, 8, 9)
EOS_IDS = _longs([1, -1], [2, 30], [4, 5], [6, 7])
LOGITS = _randn(3, 40)
TOKENS = _longs(4, 37, 6)
SAMPLING = (
    _ints(0.7, 1.3, 2.0, 0.9, dtype=torch.float32),
    _ints(3, 0, 7, 5),
    _ints(0.9, 0.5, 0.8, 0.7, dtype=torch.float64),
    _ints(0.01, 0.1, 0.05, 0.02, dtype=torch.float64),
    _longs(11, 222, 3333, 44),
    COUNTS,
)
POOL = (_randn(40, 2, 8, 16), _randn(40, 2, 8, 16) + 1)
TABLE = torch.arange(40, dtype=torch.int32, device=DEVICE).view(4, 10)
# One is long enough for several programs, which count in the counters.
CONTEXT_LENS = _ints(70, 5, 8, 9)
ATTENTION = {
    "scale": 0.25,
    "sinks": _randn(4),
    "alibi_slopes": _ints(0.1, 0.2, 0.3, 0.4, dtype=torch.float32),
}
DECODE = (*POOL, TABLE, SLOTS, CONTEXT_LENS, _zeros(6))
HEADS = (_randn(3, 4, 16), _randn(3, 2, 16), _randn(3, 2, 16) + 1)
ROTATION = (_randn(3, 8), _randn(3, 8) + 1)
GAINS = {"q_norm": _randn(16), "k_norm": _randn(16) + 1, "eps": 1e-6}
LATENTS = (_randn(40, 1, 8, 32), _randn(40, 1, 8, 16) + 1)
EXPERTS = (_randn(4, 12, 16), _randn(4, 16, 6), _randn(4, 12), _randn(4, 16))

CASES = {
    "activation": Case((_randn(3, 20),), {"activation": "silu"}),
    "rms_norm_add": Case((_randn(3, 20), _randn(3, 20) + 1, _randn(20)), {"eps": 1e-6}),
    "add_rms_norm": Case((_randn(3, 20), _randn(3, 20) + 1, _randn(20)), {"eps": 1e-6}),
    "advance": Case(
        (
            TOKENS,
            SLOTS,
            _longs(9, 8, 7, 6),
            _ints(40, 30, 20, 10),
            _ints(45, 35, 25, 15),
            COUNTS,
            _ints(4, 50, 60, 9),
            _ints(0, 1, 0, 1, dtype=torch.bool),
            EOS_IDS,
            _longs(-1, 0, 17, 18),
            _longs(*[[i, 1, 2, 3] for i in range(5)]),
            _zeros(1),
        ),
        takes=("tokens", "slots"),
    ),
    "apply_min_tokens": Case(
        (LOGITS, SLOTS, COUNTS, _ints(4, 0, 6, 2), EOS_IDS), takes=("slots",)
    ),
    "apply_repetition_penalty": Case(
        (
            LOGITS,
            _ints([7, 8], [9, 10], [11, 12], [13, 14]),
            SLOTS,
            _ints(1.1, 1.2, 1.3, 1.4, dtype=torch.float32),
        ),
        takes=("slots",),
    ),
    "apply_suppress_mask": Case(
        (LOGITS, _ints([7, 8], [9, 10], [11, 12], [13, 14]), SLOTS), takes=("slots",)
    ),
    "argmax": Case((LOGITS,)),
    "checksum": Case((_ints(*range(100)), _longs(5))),
    "copy_blocks": Case((_randn(6, 2, 8), _longs(0, 3), _longs(1, 4))),
    "embed": Case((_longs(3, 5, 1, 2), SLOTS, _randn(7, 20))),
    "experts": Case(
        (_randn(3, 16), _ints([0, 1], [3, 2], [1, 3]), _randn(3, 2), *EXPERTS),
        {"residual": _randn(3, 16)},
    ),
    "fused_decode_attention": Case((*HEADS, *ROTATION, *DECODE), {**ATTENTION, **GAINS}),
    "fused_linear": Case(
        (
            # So many that programs share a sum, and count in the counters.
            _randn(17, 512, dtype=torch.float16),
            [_randn(8, 512, dtype=torch.float16), _randn(6, 512, dtype=torch.float16)],
            [_randn(8, dtype=torch.float16), None],
            _randn(512),
        ),
        {
            "norm": True,
            "eps": 1e-6,
            "residual": _randn(17, 14, dtype=torch.float16),
            "counters": _zeros(NUM_COUNTERS),
            "lora_x": _randn(17, 5),
            "updates": [_randn(8, 3), _randn(6, 2)],
            "update_scales": (0.5, 2.0),
        },
    ),
    "glu": Case((_randn(3, 20), _randn(3, 20) + 1), {"activation": "silu"}),
    "head_linear": Case((_randn(3, 4, 16), _randn(4, 16, 24))),
    "joined_linear": Case(
        (
            _randn(2, 300),
            _randn(2, 300) + 1,
            _randn(300),
            [_randn(8, 300), _randn(6, 300)],
            [_randn(8), None],
            _randn(300),
        ),
        {"join_eps": 1e-6, "norm": True, "eps": 1e-6, "counters": _zeros(NUM_COUNTERS)},
    ),
    "latent_cache_write": Case(
        (
            _randn(3, 4, 32),
            _randn(3, 48),
            *ROTATION,
            *LATENTS,
            _randn(32),
        ),
        {"eps": 1e-6, "rotation": "pairs_to_halves", "slot_mapping": _longs(5, -1, 17)},
    ),
    "latent_decode_attention": Case(
        (_randn(3, 4, 32), _randn(3, 4, 16), *LATENTS, TABLE, SLOTS, CONTEXT_LENS),
        {"scale": 0.25},
    ),
    "latent_prefill_attention": Case(
        (
            _randn(7, 4, 32),
            _randn(7, 4, 16),
            *LATENTS,
            TABLE,
            SLOTS,
            _ints(0, 2, 5, 7),
            COUNTS,
        ),
        {"scale": 0.25},
    ),
    "lora_expand_": Case((_randn(3, 20), _randn(3, 4), _randn(20, 4)), {"scale": 0.5}),
    "lora_shrink": Case(
        (_randn(3, 32), [_randn(4, 32), _randn(2, 32)], _randn(32)), {"norm": True, "eps": 1e-6}
    ),
    "mark_seen": Case(
        (_ints([7, 8], [9, 10], [11, 12], [13, 14]), SLOTS, TOKENS), takes=("slots", "tokens")
    ),
    "paged_decode_attention": Case((HEADS[0], *DECODE), ATTENTION),
    "paged_prefill_attention": Case(
        (_randn(7, 4, 16), *POOL, TABLE, SLOTS, _ints(0, 2, 5, 7), COUNTS),
        {**ATTENTION, "max_query_len": 3},
    ),
    "record_tokens": Case(
        (
            torch.where(torch.arange(40, device=DEVICE) == 37, torch.nan, LOGITS),
            TOKENS,
            SLOTS,
            _randn(3),
            _ints(1, 0, 0, 1, dtype=torch.bool),
            _randn(4),
        ),
        takes=("tokens", "slots", "logprobs"),
    ),
    "rms_norm": Case((_randn(3, 4, 20), _randn(20)), {"eps": 1e-6}),
    "rotary_by_span": Case(
        (
            COUNTS,
            SLOTS,
            _ints(1, 20, 3, 40),
            _ints(10, 2, 30, 4),
            _randn(8).abs(),
            _randn(8).abs() + 1,
        ),
        {"limit": 12},
    ),
    "rotary_cache_write": Case((*HEADS, *ROTATION, *POOL, _longs(5, -1, 17)), GAINS),
    "rotary_table": Case((COUNTS, SLOTS, _randn(8).abs())),
    "route_experts": Case(
        (_randn(3, 10),), {"top_k": 2, "scoring": "sigmoid", "correction": _randn(10)}
    ),
    "sample": Case((LOGITS, SLOTS, *SAMPLING), takes=("slots",)),
    "sample_with_scores": Case((LOGITS, SLOTS, *SAMPLING), takes=("slots",)),
    "token_logprobs": Case((LOGITS, TOKENS), takes=("tokens",)),
    "top_logprobs": Case((LOGITS, 3)),
}
