"""Beam search on the paged cache: transformers' own search, handed a model that is our run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from torch_paged.engine.batch import BatchLimits, BatchRun
from torch_paged.engine.out_of_memory import one_kind_of_error
from torch_paged.generate.call import Call
from torch_paged.generate.decide import fallback_reasons
from torch_paged.generate.images import prompts_of
from torch_paged.generate.leased_cache import settle_foreign
from torch_paged.generate.past import fill_cache, wanted_kv
from torch_paged.generate.registry import find_session
from torch_paged.generate.sample import fall_back, on_model_device
from torch_paged.generate.session import Session
from torch_paged.patches import seams
from torch_paged.report import CallReport


class RunAsModel:
    """What beam search needs of a model: the forward is a run's step, the rest the model's own."""

    def __init__(self, model: Any, run: BatchRun) -> None:
        self._model = model
        self._run = run
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        if name == "_reorder_cache":  # the cache knows
            raise AttributeError(name)
        return getattr(self._model, name)

    def _prefill(self, *args: Any, **kwargs: Any) -> Any:
        return self._output(self._run.prefill())

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"tokens": input_ids[:, -1]}

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> dict[str, Any]:
        return model_kwargs

    def __call__(self, tokens: Tensor, return_dict: bool = True) -> Any:
        self._run.commit(tokens.to(self._run.rows.index.device))
        return self._output(self._run.next_logits())

    def _output(self, logits: Tensor) -> Any:
        self.num_steps += 1
        return SimpleNamespace(logits=logits[:, None], attentions=None, hidden_states=None)


class BeamBlocks:
    """What beam search needs of a cache."""

    def __init__(self, run: BatchRun) -> None:
        self._run = run

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each row go on from the beam that its tokens came from."""
        self._run.reorder(beam_idx.tolist())


def beam_search(
    self: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Any:
    """Stand in for `GenerationMixin._beam_search`; others' models pass through."""
    search = seams.DECODING_SEAMS["_beam_search"].original
    rest = (input_ids, logits_processor, stopping_criteria, generation_config)

    def original() -> Any:
        return search(self, *rest, synced_gpus=synced_gpus, **model_kwargs)

    session = find_session(self)
    if session is None:
        return original()
    call = Call(*rest, synced_gpus, None, model_kwargs)
    settle_foreign(seams.call_cache(model_kwargs), session.core)
    with session.lock, on_model_device(session):
        reasons = fallback_reasons(self, session, call, "_beam_search")
        if reasons:
            return fall_back(session, reasons, original)
        why = ("beams are compared between the steps",)
        session.last_call = CallReport(session.decide_tier(), "stepped", why)
        session.miss_logprobs("beam search reports its own scores")
        return _run(self, session, call)


def _run(model: Any, session: Session, call: Call) -> Any:
    assert session.core is not None and session.step is not None
    config, kwargs = call.generation_config, dict(call.model_kwargs)
    limits = BatchLimits(max(int(config.max_length) - call.input_ids.shape[1], 1))
    # Beams change their blocks at every step, so none are handed out ahead.
    cache = seams.call_cache(kwargs)
    core = session.core
    keeps = wanted_kv(cache, bool(config.return_dict_in_generate), core)
    with one_kind_of_error():
        prompts, columns = prompts_of(session, call, keeps)
    batch = BatchRun(core, prompts, limits, lag=0, steps_ahead=1, keeps=keeps)
    with one_kind_of_error(), batch as run:
        stand_in = RunAsModel(model, run)
        if (name := seams.cache_name(kwargs)) is not None:
            kwargs[name] = BeamBlocks(run)
        output = seams.DECODING_SEAMS["_beam_search"].original(
            stand_in,
            call.input_ids,
            call.logits_processor,
            call.stopping_criteria,
            config,
            synced_gpus=False,
            **kwargs,
        )
        if keeps != "nothing":
            fill_cache(cache, run, columns, stand_in.num_steps, session.step)
        if config.return_dict_in_generate:
            seams.replace_output_cache(output, cache)
    return output


__all__ = ["beam_search"]
