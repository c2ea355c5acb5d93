"""One model compared with itself: its step, as we run it, and Hugging Face's forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_paged.config import Config
from torch_paged.decoder.rotary import preserved
from torch_paged.decoder.spec import DecoderSpec
from torch_paged.decoder.step import DecoderStep
from torch_paged.engine.core import EngineCore
from torch_paged.engine.protocols import StepModel
from torch_paged.generate.check.module_walk import ModuleWalk, compared_modules
from torch_paged.generate.check.own_calls import OwnForward, own_forwards
from torch_paged.generate.check.plan_walk import PlanWalk, modules_of
from torch_paged.generate.check.points import LIMITS, Point
from torch_paged.generate.selftest import our_logits, random_ids, selftest_reason
from torch_paged.generate.session import placement_reason
from torch_paged.patches.families import hook_reason, read_spec
from torch_paged.patches.patched_step import PatchedStep
from torch_paged.patches.refusal import SpecRefusal

PROMPT_TOKENS = 24  # past one block of 16, not a multiple
DECODE_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a check found.

    Attributes:
        tier: that was compared; "eager" if there is nothing of ours.
        reasons: why the tier is no higher.
        points: in the order in which they were computed.
        uncompared: what has no counterpart in Hugging Face's modules.
        failure: what our step raised, and where.
        selftest: how its logits differ when it is given nothing on the way; "" if they agree.
        notes: what this check could not see.
    """

    tier: str
    limit: float
    reasons: tuple[str, ...] = ()
    points: tuple[Point, ...] = ()
    uncompared: tuple[str, ...] = ()
    failure: str = ""
    selftest: str = ""
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Say whether nothing parts."""
        return not (self.failure or self.selftest or any(point.parts for point in self.points))


def compare_model(model: Any, num_prompt_tokens: int = PROMPT_TOKENS) -> Comparison:
    """Run `model` as Hugging Face runs it and as its tier does, and compare what is between.

    The model is left as it was.
    """
    limit = LIMITS.get(model.get_input_embeddings().weight.dtype, LIMITS[torch.bfloat16])
    reason = placement_reason(model) or hook_reason(model)
    if reason:
        return Comparison("eager", limit, (reason,))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return _compare(model, num_prompt_tokens, limit)
    finally:
        model.train(was_training)


def _compare(model: Any, num_prompt_tokens: int, limit: float) -> Comparison:
    reasons: list[str] = []
    try:
        return _compare_plan(model, read_spec(model), num_prompt_tokens, limit)
    except SpecRefusal as refusal:
        reasons.append(str(refusal))
    try:
        step = PatchedStep(model)
    except SpecRefusal as refusal:
        return Comparison("eager", limit, (*reasons, str(refusal)))
    return _compare_modules(model, step, num_prompt_tokens, limit, tuple(reasons))


def _compare_plan(
    model: Any, spec: DecoderSpec, num_prompt_tokens: int, limit: float
) -> Comparison:
    walk = PlanWalk(limit)
    ids = random_ids(model, num_prompt_tokens + DECODE_TOKENS).to(model.device)
    # Both sides start from what the rotary modules remember now.
    with preserved(spec):
        forwards = own_forwards(model, modules_of(spec), ids, num_prompt_tokens)
    failure = ""
    step = DecoderStep(model, spec)
    step.visitor = walk
    try:
        with preserved(spec):
            _drive(step, walk, forwards, ids, num_prompt_tokens)
    except Exception as error:  # a wrong row may break any op in its own way
        failure = f"{type(error).__name__}: {error}"
        if walk.running is not None:
            failure += f"\nat {walk.running}"
    selftest = "" if failure else _selftest(model, DecoderStep(model, spec), ids)
    windows = {layer.attention.window for layer in spec.layers}
    return Comparison(
        "fused",
        limit,
        points=tuple(walk.points),
        uncompared=tuple(walk.uncompared),
        failure=failure,
        selftest=selftest,
        notes=_unseen_windows(windows, num_prompt_tokens),
    )


def _compare_modules(
    model: Any, step: PatchedStep, num_prompt_tokens: int, limit: float, reasons: tuple[str, ...]
) -> Comparison:
    modules = compared_modules(model)
    walk = ModuleWalk(modules, limit)
    ids = random_ids(model, num_prompt_tokens + DECODE_TOKENS).to(model.device)
    forwards = own_forwards(model, modules.values(), ids, num_prompt_tokens)
    failure = ""
    try:
        with walk.watching():
            _drive(step, walk, forwards, ids, num_prompt_tokens)
    except Exception as error:  # a model may object to our attention in its own way
        failure = f"{type(error).__name__}: {error}"
    selftest = "" if failure else _selftest(model, PatchedStep(model), ids)
    return Comparison(
        "patched",
        limit,
        reasons,
        tuple(walk.points),
        tuple(walk.uncompared),
        failure,
        selftest,
        _unseen_windows({call.window for call in step.calls}, num_prompt_tokens),
    )


def _drive(
    step: StepModel,
    walk: PlanWalk | ModuleWalk,
    forwards: list[OwnForward],
    ids: Tensor,
    num_prompt_tokens: int,
) -> None:
    """Run our step over the same calls as `forwards`, one of ours beside each of theirs."""
    with _core(step, ids) as core:
        logits = our_logits(core, ids, num_prompt_tokens)
        for forward in forwards:
            walk.begin(forward)
            walk.end(next(logits))
        logits.close()


def _selftest(model: Any, step: StepModel, ids: Tensor) -> str:
    with _core(step, ids) as core:
        return selftest_reason(model, core)


@contextlib.contextmanager
def _core(step: StepModel, ids: Tensor) -> Iterator[EngineCore]:
    """Make an engine core that runs the prompt in one piece, op by op."""
    tokens = max(ids.shape[0], 64)
    config = Config(cuda_graphs=False, max_num_seqs=1, max_num_batched_tokens=tokens)
    core = EngineCore(step, config, tokens)
    try:
        yield core
    finally:
        core.release()


def _unseen_windows(windows: set[int], num_prompt_tokens: int) -> tuple[str, ...]:
    unseen = sorted(window for window in windows if window >= num_prompt_tokens)
    if not unseen:
        return ()
    sizes = ", ".join(map(str, unseen))
    return (
        f"the prompt of {num_prompt_tokens} tokens is not longer than the window of {sizes}: "
        f"pass --tokens {unseen[-1] + 8} to see it at work",
    )


def model_class(model: nn.Module) -> str:
    """Name the class that a row of the table would be for."""
    return f"{type(model).__module__.removeprefix('transformers.models.')}.{type(model).__name__}"


__all__ = ["PROMPT_TOKENS", "Comparison", "compare_model", "model_class"]
