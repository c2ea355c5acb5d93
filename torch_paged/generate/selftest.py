"""One comparison of our logits with the model's own before the first accelerated call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_paged.engine.batch import BatchLimits, BatchRun, PackedPrompts
from torch_paged.engine.core import EngineCore
from torch_paged.patches.seams import (
    CACHE_NAMES,
    call_cache,
    eager_attention,
    forward_arguments,
)

_PROMPT_TOKENS = 19  # past one block of 16, not a multiple
_DECODE_TOKENS = 3

# Root mean square of the difference over that of the logits themselves. Rounding alone stays an
# order of magnitude below; a wrong norm, rotary or scale lands an order above.
_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def selftest_reason(model: Any, core: EngineCore) -> str:
    """Return "" if prefill and decode agree with `model(...)` on a short random prompt."""
    total = _PROMPT_TOKENS + _DECODE_TOKENS
    generator = torch.Generator().manual_seed(0)
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocab, (1, total), generator=generator).to(core.device)
    with torch.no_grad():
        with eager_attention(model):
            expected = _own_logits(model, ids)
        got = torch.stack(_our_logits(core, ids[0]))
    expected, got = expected.float(), got.float()
    if not torch.isfinite(expected).all():
        # Nothing to compare with; HF's own output is no better.
        return ""
    scale = (expected - expected.mean(-1, keepdim=True)).pow(2).mean().sqrt()
    error = float((got - expected).pow(2).mean().sqrt() / scale.clamp_min(1e-20))
    limit = _LIMITS.get(core.step.dtype, 0.1)
    if error <= limit:
        return ""
    return (
        f"self-test: logits differ from the model's own by {error:.2g} of their spread "
        f"(limit {limit:g})"
    )


def _own_logits(model: Any, ids: Tensor) -> Tensor:
    """Return logits [tokens, vocab_size] of the model called as `generate` calls it.

    With positions, since some types place tokens otherwise on their own, and token by token with
    a cache, since that may forget what masks still show.
    """
    arguments = forward_arguments(model)
    name = next((name for name in CACHE_NAMES if name in arguments), "")
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    rows, start, cache = [], 0, None
    for stop in range(_PROMPT_TOKENS, ids.shape[1]):
        kwargs: dict[str, Any] = {"use_cache": bool(name)}
        if "position_ids" in arguments:
            kwargs["position_ids"] = positions[:, start:stop]
        if cache is not None:
            kwargs[name] = cache
        out = model(ids[:, start:stop], **kwargs)
        cache = call_cache(out) if name else None
        rows.append(out.logits[0, -1])
        start = 0 if cache is None else stop
    return torch.stack(rows)


def _our_logits(core: EngineCore, ids: Tensor) -> list[Tensor]:
    positions = torch.arange(_PROMPT_TOKENS, dtype=torch.int32, device=core.device)
    prompts = PackedPrompts(
        lengths=(_PROMPT_TOKENS,),
        ids=ids[:_PROMPT_TOKENS],
        embeddings=None,
        positions=positions,
        last_positions=positions[-1:],
    )
    out = []
    with BatchRun(core, prompts, BatchLimits(_DECODE_TOKENS + 1), lag=0) as run:
        out.append(run.prefill()[0].clone())
        for step in range(_DECODE_TOKENS - 1):
            run.commit(ids[_PROMPT_TOKENS + step : _PROMPT_TOKENS + step + 1])
            out.append(run.next_logits(captured=False)[0].clone())
    return out
