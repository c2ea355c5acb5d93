"""Drafts of an accelerated assistant: a row of its own blocks, kept from round to round.

Transformers' candidate generator decides how many tokens to draft, learns from what was accepted
and calls `assistant.generate()` for each round. Only that call is replaced here: arguments are
resolved by `generate()` once, and a round extends the row by what was accepted and goes on.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor

from torch_paged.engine.draw_history import DrawHistory
from torch_paged.engine.row_run import RowRun
from torch_paged.generate.call import Call
from torch_paged.generate.decide import fallback_reasons
from torch_paged.generate.draft_sampler import DraftSampler, take_draft_sampler
from torch_paged.generate.images import is_own_prefill
from torch_paged.generate.prompts import pack
from torch_paged.generate.registry import find_session
from torch_paged.generate.sample import choose_tokens, on_model_device
from torch_paged.generate.session import Session
from torch_paged.generate.transforms import Shape
from torch_paged.patches import draft_seams, seams
from torch_paged.report import CallReport

_KNOWN_CRITERIA = (
    seams.MaxLengthCriteria,
    seams.EosTokenCriteria,
    draft_seams.ConfidenceCriteria,
)


def draft_with(generator: Any, stack: contextlib.ExitStack) -> None:
    """Let a candidate generator draft where that is quickest, while `stack` is open.

    An accelerated assistant drafts on its own engine.
    """
    if type(generator) is draft_seams.PromptLookupCandidateGenerator:
        draft_seams.look_up_on_host(generator)
    # Others translate tokens in between, or draft in some way of their own.
    if type(generator) is not draft_seams.AssistedCandidateGenerator:
        return
    session = find_session(generator.assistant_model)
    if session is not None:
        stack.enter_context(session.lock)
        draft_seams.replace_drafting(generator, Drafter(generator, session, stack))


class Drafter:
    """Stands in for the candidate generator's call of `assistant.generate()`."""

    def __init__(self, generator: Any, session: Session, stack: contextlib.ExitStack) -> None:
        self._generator = generator
        self._session = session
        self._rows = stack.enter_context(contextlib.ExitStack())
        self._run: RowRun | None = None
        self._call: Call | None = None
        self._eos: frozenset[int] = frozenset()
        self._lasts = False  # the call is the same in every round
        self._padding = 0  # columns of the ids that are not in the row
        self._num_seen = 0  # columns of the ids that were looked at
        self._hidden: int | None = None  # a token that generate() takes for padding

    def __call__(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return ids [1, width + n] with a draft, and its scores [1, n, vocab_size]."""
        session, ids = self._session, arguments["input_ids"]
        with on_model_device(session):
            if self._run is not None and self._shows_padding(ids):
                # generate() hides it from now on, which blocks cannot: transformers goes on alone.
                self._rows.close()
                draft_seams.opt_out(self._generator)
                self._resolve(arguments)
                return draft_seams.restore_drafting(self._generator, arguments)
            if self._call is None or not self._lasts or arguments["min_new_tokens"]:
                self._resolve(arguments)
            assert self._call is not None
            if self._run is None and self._is_refused(session):
                # Before anything was drawn; the assistant's own generate() says why.
                return draft_seams.restore_drafting(self._generator, arguments)
            logits = self._catch_up(ids)
            sampler = self._take_sampler(ids, arguments["max_new_tokens"])
            loop = "stepped" if sampler is None else "device"
            why = ("it drafts for another model",)
            session.last_call = CallReport(session.decide_tier(), loop, why)
            if sampler is None:
                self._lasts = False  # its criteria count the tokens of one round
                return self._draft_stepwise(ids, logits)
            return self._draft_ahead(ids, logits, sampler, arguments["max_new_tokens"])

    def _is_refused(self, session: Session) -> bool:
        assert self._call is not None
        model = self._generator.assistant_model
        if fallback_reasons(model, session, self._call, "_sample"):
            return True
        if is_own_prefill(self._call):
            return True
        # Nor can a state be set back to where a draft was accepted, or frequencies.
        return session.step is None or session.step.keeps_state or session.step.has_spans

    def _resolve(self, arguments: dict[str, Any]) -> None:
        """Let `generate()` make of this round's arguments what it makes of them."""
        generator = self._generator
        input_ids, processors, criteria, config, kwargs = draft_seams.resolve_draft(
            generator, arguments, is_first=self._num_seen == 0
        )
        config = copy.copy(config)
        config.is_assistant = config.return_dict_in_generate = False
        self._call = Call(input_ids, processors, criteria, config, False, None, kwargs)
        # Read once: behind a step that runs, the host would wait for it.
        self._eos = frozenset(
            token
            for criterion in criteria
            if type(criterion) is seams.EosTokenCriteria
            for token in seams.end_tokens(criterion, config)
        )
        own = generator.logits_processor
        self._lasts = all(
            type(p) in seams.SCORE_WARPERS or any(p is mine for mine in own) for p in processors
        ) and all(type(criterion) in _KNOWN_CRITERIA for criterion in criteria)
        if self._num_seen == 0:
            self._hidden = draft_seams.inferred_padding(generator, config)
            self._num_seen = input_ids.shape[1]

    def _shows_padding(self, ids: Tensor) -> bool:
        """Say whether ids that are new since the last round have what is taken for padding.

        generate() infers a mask where it gets none, and the main one leaves out a mask of ones.
        """
        if self._hidden is None:
            return False
        fresh = ids[0, self._num_seen :].tolist()
        self._num_seen = ids.shape[1]
        return self._hidden in fresh

    def _catch_up(self, ids: Tensor) -> Tensor:
        """Return logits [1, vocab_size] behind all ids."""
        core, step = self._session.core, self._session.step
        assert core is not None and step is not None and self._call is not None
        run = self._run
        if run is None:
            prompts, _ = pack(step, core, self._call, ids)
            run = self._run = self._rows.enter_context(RowRun(core, prompts))
            self._padding = ids.shape[1] - run.num_tokens
            return run.prefill()
        run.rewind(min(run.num_tokens, ids.shape[1] - self._padding - 1))
        return run.extend(ids[0, self._padding + run.num_tokens :])[-1:]

    def _take_sampler(self, ids: Tensor, max_tokens: int) -> DraftSampler | None:
        """Return the sampler of a round; None where something else must see every token."""
        call, session = self._call, self._session
        assert call is not None and session.core is not None and self._run is not None
        if any(type(criterion) not in _KNOWN_CRITERIA for criterion in call.stopping_criteria):
            return None
        if ids.device != session.core.device:
            return None
        sampler = take_draft_sampler(
            session.samplers,
            call.logits_processor,
            Shape(1, self._run.vocab_size, session.core.device),
            ids.shape[1] + max_tokens,
            max_tokens,
            draws=call.generation_config.do_sample,
        )
        if sampler is not None:
            sampler.start(call.logits_processor, ids, self._run)
        return sampler

    def _draft_ahead(
        self, ids: Tensor, logits: Tensor, sampler: DraftSampler, max_tokens: int
    ) -> tuple[Tensor, Tensor | None]:
        """Launch whole steps; what was launched past the end of the draft is dropped."""
        run, session, call = self._run, self._session, self._call
        assert run is not None and call is not None and session.core is not None
        eos = self._eos
        # It changes from round to round, and drafts often end by it: no step is wasted on that.
        threshold = draft_seams.confidence_threshold(self._generator)
        lag = session.config.lag if threshold <= 0 else 0
        watched = bool(eos) or threshold > 0
        draws = DrawHistory(session.core.device, lag) if sampler.draws else None
        launched = count = 0
        confidences = []
        while count < max_tokens:
            while launched < max_tokens and launched - count <= lag:
                if launched:
                    run.launch(sampler)
                else:
                    run.choose(logits, sampler)
                if watched:
                    sampler.post(launched)
                if draws is not None:
                    draws.note()
                launched += 1
            if watched:
                token, confidence = sampler.wait(count)
                confidences.append(confidence)
            count += 1
            if watched and (token in eos or confidence < threshold):
                break
        if draws is not None and launched > count:
            draws.rewind(launched - count)
        session.core.counters.tokens += count
        draft_seams.note_confidences(self._generator, confidences)
        draft = sampler.tokens(count)[None]
        return torch.cat([ids, draft], dim=1), sampler.scores[None, :count]

    def _draft_stepwise(self, ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Transformers' own loop around our forward."""
        run, call = self._run, self._call
        assert run is not None and call is not None and self._session.core is not None
        width = ids.shape[1]
        all_scores: tuple[Tensor, ...] = ()
        while True:
            raw = logits.to(copy=True, dtype=torch.float32, device=ids.device)
            scores = call.logits_processor(ids, raw)
            all_scores += (scores,)
            tokens = choose_tokens(scores, call.generation_config.do_sample)
            ids = torch.cat([ids, tokens[:, None]], dim=1)
            if call.stopping_criteria(ids, all_scores).all():
                break
            logits = run.extend(tokens.to(logits.device))
        self._session.core.counters.tokens += len(all_scores)
        stacked = torch.stack(all_scores, dim=1)
        chosen = ids[:, width:, None]
        confidences = stacked.softmax(-1).gather(2, chosen).flatten().tolist()
        draft_seams.note_confidences(self._generator, confidences)
        return ids, stacked


__all__ = ["Drafter", "draft_with"]
