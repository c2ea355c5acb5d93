"""The replacement of `GenerationMixin._sample`: our loops, or the original untouched."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_paged.engine.batch import BatchLimits, BatchRun
from torch_paged.engine.out_of_memory import one_kind_of_error
from torch_paged.engine.sampler import Sampler
from torch_paged.errors import UnsupportedFeatureError
from torch_paged.generate.call import Call
from torch_paged.generate.decide import OPTED_OUT, Decision, decide
from torch_paged.generate.images import prompts_of
from torch_paged.generate.leased_cache import settle_foreign
from torch_paged.generate.logprobs import (
    RecordingSampler,
    TokenLogprobs,
    WatchedProcessors,
    take_recording_sampler,
)
from torch_paged.generate.past import wanted_kv
from torch_paged.generate.registry import find_session
from torch_paged.generate.returned_cache import hand_to_cache
from torch_paged.generate.samplers import make_sampler
from torch_paged.generate.session import Session
from torch_paged.patches import seams
from torch_paged.report import CallReport

_UNLIMITED = 1 << 40


def sample(
    self: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Stand in for `GenerationMixin._sample`; models that are not accelerated pass through."""

    def original() -> Any:
        return seams.SAMPLE_SEAM.original(
            self,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )

    session = find_session(self)
    if session is None:
        return original()
    call = Call(
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus,
        streamer,
        model_kwargs,
    )
    settle_foreign(seams.call_cache(model_kwargs), session.core)
    with session.lock, on_model_device(session):
        decision = decide(self, session, call)
        if decision.loop is not None:
            tier = session.decide_tier()
            session.last_call = CallReport(tier, decision.loop, tuple(decision.reasons))
            return _run(session, call, decision)
        # Still under the lock: the model must not be switched while its own loop runs.
        return fall_back(session, decision.reasons, original)


def fall_back(session: Session, reasons: list[str], original: Callable[[], Any]) -> Any:
    """Run Hugging Face's own code and note why, or raise if that was asked for.

    A call that opted out gets what it asked for: that is no fallback, and neither raises nor logs.

    Raises:
        UnsupportedFeatureError: with ``on_unsupported="raise"``.
    """
    if reasons == [OPTED_OUT]:
        session.last_call = CallReport("eager", None, (OPTED_OUT,))
        return original()
    if session.config.on_unsupported == "raise":
        raise UnsupportedFeatureError(
            f"this call cannot run on the accelerated path: {'; '.join(reasons)}; "
            "change the call, or pass on_unsupported='fallback'"
        )
    session.record_fallback(reasons)
    return original()


@contextlib.contextmanager
def on_model_device(session: Session) -> Iterator[None]:
    """Run on the model's device, in order behind the last call."""
    step = session.step
    if step is None or step.device.type != "cuda":
        yield
        return
    with torch.cuda.device(step.device):
        session.enter_stream()
        yield


def _run(session: Session, call: Call, decision: Decision) -> Any:
    assert session.core is not None
    config = call.generation_config
    lag = session.config.lag if decision.loop != "stepped" else 0
    cache = seams.call_cache(call.model_kwargs)
    keeps = wanted_kv(cache, bool(config.return_dict_in_generate), session.core)
    limits = BatchLimits(
        decision.max_new_tokens or _UNLIMITED,
        decision.eos_ids or (),
        _pad_token(call, decision),
    )
    extras: dict[str, Any] = {}
    step = session.step
    assert step is not None
    with one_kind_of_error():
        prompts, columns = prompts_of(session, call, keeps)
    batch = BatchRun(session.core, prompts, limits, lag, keeps=keeps)
    with one_kind_of_error(), batch as run:
        logits = run.prefill()
        if decision.loop == "stepped":
            sequences, num_steps, extras = _stepped(run, logits, call, decision, session.logprobs)
        else:
            deliver = None if call.streamer is None else call.streamer.put
            sampler = _make_sampler(session, call, decision, run)
            num_steps = run.run(logits, sampler, deliver)
            if isinstance(sampler, RecordingSampler) and session.logprobs is not None:
                session.logprobs.take(sampler.values(num_steps))
            sequences = torch.cat([call.input_ids, run.tokens(num_steps)], dim=-1)
            _warn_of_length(call, sequences)
        if call.streamer is not None:
            call.streamer.end()
        if keeps != "nothing":
            hand_to_cache(cache, run, columns, num_steps, step, session.core)
        if not config.return_dict_in_generate:
            return sequences
    return seams.decoder_only_output(sequences=sequences, cache=cache, **extras)


def _warn_of_length(call: Call, sequences: Tensor) -> None:
    """Let the length criterion say what it says in transformers' loop, asked at every step."""
    for criterion in call.stopping_criteria:
        if type(criterion) is not seams.MaxLengthCriteria:
            continue
        asked = min(sequences.shape[1], math.ceil(criterion.max_length) - 1)
        known = criterion.max_position_embeddings
        if known is not None and asked > max(known, call.input_ids.shape[1]):
            criterion(sequences[:, :asked], None)


def _make_sampler(session: Session, call: Call, decision: Decision, run: BatchRun) -> Sampler:
    config, ids, limit = call.generation_config, call.input_ids, decision.max_new_tokens or 0
    shelf, processors = session.samplers, call.logits_processor
    if session.logprobs is not None:
        return take_recording_sampler(
            shelf, processors, ids, run, limit, do_sample=config.do_sample
        )
    width = ids.shape[1] + limit
    return make_sampler(shelf, processors, ids, run, width, do_sample=config.do_sample)


def _stepped(
    run: BatchRun, logits: Tensor, call: Call, decision: Decision, logprobs: TokenLogprobs | None
) -> tuple[Tensor, int, dict[str, Any]]:
    """Transformers' own loop around our forward: what chooses and stops runs between steps."""
    config, input_ids = call.generation_config, call.input_ids
    watch = None if logprobs is None else WatchedProcessors(call.logits_processor)
    process = call.logits_processor if watch is None else watch
    keep_scores = config.return_dict_in_generate and config.output_scores
    keep_logits = config.return_dict_in_generate and config.output_logits
    all_scores: tuple[Tensor, ...] = ()
    all_logits: tuple[Tensor, ...] = ()
    unfinished = torch.ones(input_ids.shape[0], dtype=torch.long, device=input_ids.device)
    pad, pads = _pad_token(call, decision), _pads_finished_rows(call)
    num_steps = 0
    while True:
        raw = logits.to(copy=True, dtype=torch.float32, device=input_ids.device)
        scores = process(input_ids, raw)
        if keep_scores:
            all_scores += (scores,)
        if keep_logits:
            all_logits += (raw,)
        tokens = choose_tokens(scores, config.do_sample)
        if watch is not None:
            watch.note(logits, scores, tokens, unfinished)
        if pads:
            tokens = tokens * unfinished + pad * (1 - unfinished)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
        ended = call.stopping_criteria(input_ids, all_scores if keep_scores else None)
        # Only now: a criterion may write other ids there, from which transformers goes on.
        run.commit(input_ids[:, -1].to(logits.device).contiguous())
        num_steps += 1
        unfinished = unfinished & ~ended
        if call.streamer is not None:
            call.streamer.put(tokens.cpu())
        if unfinished.max() == 0:
            break
        logits = run.next_logits()
    if watch is not None and logprobs is not None:
        logprobs.take(watch.values())
    extras = {
        "scores": all_scores if keep_scores else None,
        "logits": all_logits if keep_logits else None,
    }
    return input_ids, num_steps, extras


def choose_tokens(scores: Tensor, do_sample: bool) -> Tensor:
    """Choose tokens [num_rows] from scores [num_rows, vocab_size] as transformers does."""
    if do_sample:
        probs = torch.softmax(scores, dim=-1)
        return torch.multinomial(probs, num_samples=1).squeeze(1)
    return torch.argmax(scores, dim=-1)


def _pads_finished_rows(call: Call) -> bool:
    return any(hasattr(criterion, "eos_token_id") for criterion in call.stopping_criteria)


def _pad_token(call: Call, decision: Decision) -> int:
    """Return the id that finished rows emit, or -1 where they go on with real tokens."""
    if not _pads_finished_rows(call):
        return -1
    pad = seams.pad_token(call.generation_config)
    return -1 if pad is None else pad
