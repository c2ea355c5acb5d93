"""One comparison of our logits with the model's own before the first accelerated call."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_paged.decoder.rotary import preserved
from torch_paged.decoder.step import DecoderStep
from torch_paged.engine.batch import BatchLimits, BatchRun, PackedPrompts
from torch_paged.engine.core import EngineCore
from torch_paged.errors import OutOfBlocks
from torch_paged.generate.forced_routing import ForcedRouting
from torch_paged.patches.attention_seams import eager_attention
from torch_paged.patches.seams import (
    CACHE_NAMES,
    call_cache,
    forward_arguments,
)

_PROMPT_TOKENS = 19  # past one block of 16, not a multiple
_DECODE_TOKENS = 3

# Root mean square of the difference over that of the logits themselves. Rounding alone stays an
# order of magnitude below; a wrong norm, rotary or scale lands an order above.
_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def selftest_reason(model: Any, core: EngineCore) -> str:
    """Return "" if prefill and decode agree with `model(...)` on a short random prompt."""
    ids = random_ids(model, _PROMPT_TOKENS + _DECODE_TOKENS).to(core.device)
    routing = ForcedRouting(core.step)
    # Where the caller has autocast on, the answer must hold outside of that, too.
    with torch.no_grad(), torch.autocast(core.device.type, enabled=False):
        with _left_alone(core), eager_attention(model), routing.noting():
            outputs = own_outputs(model, ids, _PROMPT_TOKENS)
            expected = torch.stack([out.logits[0, -1] for out in outputs])
        # What is wrong with the settings shows here, and is not the step's fault.
        core.prepare(1, ids.shape[0], 1)
        core.make_room(1)
        try:
            with _left_alone(core), routing.giving():
                got = torch.stack(list(our_logits(core, ids, _PROMPT_TOKENS)))
        except (OutOfBlocks, torch.OutOfMemoryError):
            raise
        except Exception as failure:  # such as of a forward that casts what it computes
            reason = str(failure).partition("\n")[0]
            return f"self-test: a step raised {type(failure).__name__}: {reason}"
    expected, got = expected.float(), got.float()
    if not torch.isfinite(expected).all():
        # Nothing to compare with; HF's own output is no better.
        return ""
    scale = (expected - expected.mean(-1, keepdim=True)).pow(2).mean().sqrt()
    error = float((got - expected).pow(2).mean().sqrt() / scale.clamp_min(1e-20))
    limit = _LIMITS.get(core.step.dtype, 0.1)
    if error <= limit:
        return routing.reason(limit)
    return (
        f"self-test: logits differ from the model's own by {error:.2g} of their spread "
        f"(limit {limit:g})"
    )


def _left_alone(core: EngineCore) -> contextlib.AbstractContextManager[None]:
    """Put back what the block changes of what rotary modules remember of lengths."""
    step = core.step
    return preserved(step.spec) if isinstance(step, DecoderStep) else contextlib.nullcontext()


def random_ids(model: Any, count: int) -> Tensor:
    """Return the same ids [count] for every model of one vocabulary."""
    vocab = model.get_input_embeddings().weight.shape[0]
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(0), device="cpu")


def own_outputs(model: Any, ids: Tensor, num_prompt_tokens: int) -> Iterator[Any]:
    """Yield what the model returns for a prompt and then for each token of ids [tokens] but one.

    Called as `generate` calls it: with positions, since some types place tokens otherwise on
    their own, and token by token with a cache, since that may forget what masks still show.
    """
    arguments = forward_arguments(model)
    name = next((name for name in CACHE_NAMES if name in arguments), "")
    positions = torch.arange(ids.shape[0], device=ids.device)[None]
    start, cache = 0, None
    for stop in range(num_prompt_tokens, ids.shape[0]):
        kwargs: dict[str, Any] = {"use_cache": bool(name)}
        if "position_ids" in arguments:
            kwargs["position_ids"] = positions[:, start:stop]
        if cache is not None:
            kwargs[name] = cache
        out = model(ids[None, start:stop], **kwargs)
        cache = call_cache(out) if name else None
        yield out
        start = 0 if cache is None else stop


def our_logits(
    core: EngineCore, ids: Tensor, num_prompt_tokens: int
) -> Generator[Tensor, None, None]:
    """Yield our logits [vocab_size] for the same calls, launched op by op."""
    positions = torch.arange(num_prompt_tokens, dtype=torch.int32, device=core.device)
    prompts = PackedPrompts(
        lengths=(num_prompt_tokens,),
        ids=ids[:num_prompt_tokens],
        embeddings=None,
        positions=positions,
        last_positions=positions[-1:],
    )
    num_steps = ids.shape[0] - num_prompt_tokens
    with BatchRun(core, prompts, BatchLimits(num_steps + 1), lag=0) as run:
        # Unpadded, as the choices of experts that are given to it.
        yield run.prefill(captured=False)[0].clone()
        for step in range(num_steps - 1):
            run.commit(ids[num_prompt_tokens + step : num_prompt_tokens + step + 1])
            yield run.next_logits(captured=False)[0].clone()
