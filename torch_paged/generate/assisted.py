"""Assisted decoding on the paged cache: transformers' own loop, handed a model that is our run.

A round of transformers' loop asks for candidates, runs them through the model at once, keeps those
that the model would have chosen and crops the cache. Here the forward of a round is one step of a
few tokens behind the blocks of the row, and cropping sets the row's length back.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torch_paged.engine.out_of_memory import one_kind_of_error
from torch_paged.engine.row_run import RowRun
from torch_paged.generate.call import Call
from torch_paged.generate.decide import fallback_reasons
from torch_paged.generate.drafts import draft_with
from torch_paged.generate.leased_cache import settle_foreign
from torch_paged.generate.past import fill_cache, num_past_columns, wanted_kv
from torch_paged.generate.prompts import pack
from torch_paged.generate.registry import find_session
from torch_paged.generate.sample import fall_back, on_model_device
from torch_paged.generate.session import Session
from torch_paged.patches import draft_seams, seams
from torch_paged.report import CallReport


class VerifyingModel:
    """What assisted decoding needs of a model: the forward is a run's, the rest the model's own.

    Args:
        width: columns of the prompt.
        model_kwargs: of the call; only candidate generators read them, so that transformers' loop
            need not let masks and positions grow.
        drafts: entered for as long as the call lasts by what drafts on an engine of its own.
    """

    def __init__(
        self,
        model: Any,
        run: RowRun,
        width: int,
        model_kwargs: dict[str, Any],
        drafts: contextlib.ExitStack,
    ) -> None:
        self._model = model
        self._run = run
        self._width = width
        self._model_kwargs = model_kwargs
        self._drafts = drafts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _get_candidate_generator(self, **kwargs: Any) -> Any:
        kwargs["model_kwargs"] = self._model_kwargs
        generator = self._model._get_candidate_generator(**kwargs)
        draft_with(generator, self._drafts)
        return generator

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def _optimize_model_for_decode(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if is_first_iteration:
            return {"tokens": input_ids[0, self._width :], "behind_prompt": True}
        assert next_sequence_length is not None
        return {"tokens": input_ids[0, -next_sequence_length:]}

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> dict[str, Any]:
        return model_kwargs

    def __call__(self, tokens: Tensor, behind_prompt: bool = False) -> Any:
        logits = [self._run.prefill()] if behind_prompt else []
        if tokens.shape[0]:
            logits.append(self._run.extend(tokens))
        # A copy: transformers' loop writes to the logits, and may keep them.
        cache = SpeculativeBlocks(self._run)
        caches = dict.fromkeys(seams.CACHE_NAMES, cache)
        return SimpleNamespace(
            logits=torch.cat(logits)[None] if len(logits) > 1 else logits[0].clone()[None],
            attentions=None,
            hidden_states=None,
            **caches,
        )


class SpeculativeBlocks:
    """What assisted decoding needs of a cache."""

    is_croppable = True

    def __init__(self, run: RowRun) -> None:
        self._run = run

    def activate_past_recording(self) -> None:
        """Do nothing: blocks keep what they were given."""

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Take back the last ``-tokens_to_remove`` tokens, which were candidates."""
        self._run.rewind(self._run.num_tokens + int(tokens_to_remove))


def assisted_decoding(
    self: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    inputs_tensor: Any = None,
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Stand in for `GenerationMixin._assisted_decoding`; others' models pass through."""
    rest = (input_ids, logits_processor, stopping_criteria, generation_config)
    helpers = {
        "streamer": streamer,
        "inputs_tensor": inputs_tensor,
        "assistant_model": assistant_model,
        "assistant_tokenizer": assistant_tokenizer,
        "tokenizer": tokenizer,
    }

    def run_method(model: Any, kwargs: dict[str, Any]) -> Any:
        method = seams.DECODING_SEAMS["_assisted_decoding"].original
        return method(model, *rest, synced_gpus=synced_gpus, **helpers, **kwargs)

    session = find_session(self)
    # More rows than one are transformers' to refuse.
    if session is None or input_ids.shape[0] > 1:
        return run_method(self, model_kwargs)
    call = Call(*rest, synced_gpus, streamer, model_kwargs)
    settle_foreign(seams.call_cache(model_kwargs), session.core)
    with session.lock, on_model_device(session):
        reasons = _draft_reasons(call, assistant_model)
        reasons = fallback_reasons(self, session, call, "_assisted_decoding") or reasons
        reasons = reasons or _step_reasons(session)
        if reasons:
            return fall_back(session, reasons, lambda: run_method(self, model_kwargs))
        why = ("candidates are verified between the steps",)
        session.last_call = CallReport(session.decide_tier(), "stepped", why)
        session.miss_logprobs("assisted decoding does not record them")
        return _run(self, session, call, run_method)


def _draft_reasons(call: Call, assistant: Any) -> list[str]:
    """Say why candidates cannot be had beside our steps."""
    config = call.generation_config
    if call.model_kwargs.get("inputs_embeds") is not None:
        return ["assisted decoding of inputs_embeds"]
    if num_past_columns(seams.call_cache(call.model_kwargs)):
        # Transformers runs the whole prompt behind the tokens that the cache has already.
        return ["assisted decoding behind a cache that was passed in"]
    if config.assistant_early_exit is not None:
        return ["assistant_early_exit changes the model between its steps"]
    if draft_seams.drafts_from_hidden_states(config, assistant):
        return ["candidates are drafted from the model's hidden states"]
    return []


def _step_reasons(session: Session) -> list[str]:
    """Say why a step cannot run candidates and take them back."""
    step = session.step
    assert step is not None
    if step.keeps_state:
        return ["candidates that are refused have changed the states of layers"]
    if step.has_spans:
        return ["rotary frequencies follow the length, candidates included"]
    return []


def _run(model: Any, session: Session, call: Call, run_method: Any) -> Any:
    core, step = session.core, session.step
    assert core is not None and step is not None
    config, kwargs = call.generation_config, dict(call.model_kwargs)
    prompts, columns = pack(step, core, call, call.input_ids)
    cache, width = seams.call_cache(kwargs), call.input_ids.shape[1]
    draft_seams.record_past(cache)
    keeps = wanted_kv(cache, bool(config.return_dict_in_generate), core)
    with (
        one_kind_of_error(),
        RowRun(core, prompts, keeps=keeps) as run,
        contextlib.ExitStack() as drafts,
    ):
        name = seams.cache_name(kwargs)
        assert name is not None
        kwargs[name] = SpeculativeBlocks(run)
        verifier = VerifyingModel(model, run, width, kwargs, drafts)
        output = run_method(verifier, {name: kwargs[name], "use_cache": True})
        sequences = output.sequences if config.return_dict_in_generate else output
        num_steps = sequences.shape[1] - width
        core.counters.tokens += num_steps
        if keeps != "nothing":
            fill_cache(cache, run, columns, num_steps, step)
            draft_seams.forget_past(cache)
        if config.return_dict_in_generate:
            seams.replace_output_cache(output, cache)
    return output


__all__ = ["SpeculativeBlocks", "VerifyingModel", "assisted_decoding"]
