"""The self-test of a mixture of experts in low precision: both sides take the same experts.

Rounding alone makes a token whose experts score nearly alike change one for another, and what
comes behind is then another token's, so to say. So ours is given the choices of Hugging Face's
routers, and those that it would have made are judged apart: by how many are the same, and by how
far the weights of these differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_paged.decoder.inputs import Values
from torch_paged.decoder.plan import Instruction
from torch_paged.decoder.plan_experts import Route
from torch_paged.decoder.spec import ExpertsSpec
from torch_paged.decoder.step import DecoderStep
from torch_paged.engine.protocols import StepModel

# Of 8 experts among 128, rounding exchanges about one; a wrong score exchanges most.
_LEAST_COMMON = 0.7


class ForcedRouting:
    """Hugging Face's choices of experts, noted in its forward and given to a plan; a `Visitor`.

    Does nothing for a step without experts, or in float32, where choices are the same.
    """

    def __init__(self, step: StepModel) -> None:
        self._step = step if isinstance(step, DecoderStep) and _is_rounded(step) else None
        self._noted: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._common: list[Tensor] = []
        self._errors: list[Tensor] = []

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note what the model's own routers return."""
        routers = [] if self._step is None else _routers(self._step)
        handles = [router.register_forward_hook(self._note) for router in routers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, router: nn.Module, args: Any, output: Any) -> None:
        _, weights, ids = output
        self._noted.setdefault(id(router), []).append((weights, ids))

    @contextlib.contextmanager
    def giving(self) -> Iterator[None]:
        """Give them to our step, in the same order."""
        if self._step is None:
            yield
            return
        self._step.visitor = self
        try:
            yield
        finally:
            self._step.visitor = None

    def before(self, instruction: Instruction, values: Values) -> None:
        """See an instruction that is about to run."""

    def after(self, instruction: Instruction, values: Values) -> None:
        """Put Hugging Face's choice in the place of ours, where it is of the same tokens."""
        if not isinstance(instruction, Route):
            return
        noted = self._noted.get(id(instruction.spec.ref.module), [])
        ours, chosen = (values[name] for name in instruction.targets)
        if not noted or noted[0][1].shape != chosen.shape:
            noted.clear()  # cut in pieces, or padded: no two calls are of the same tokens
            return
        weights, ids = noted.pop(0)
        self._judge(ours, chosen, weights, ids)
        values[instruction.targets[0]] = weights.to(ours.dtype).contiguous()
        values[instruction.targets[1]] = ids.int().contiguous()

    def _judge(self, ours: Tensor, chosen: Tensor, weights: Tensor, ids: Tensor) -> None:
        same = chosen[:, :, None] == ids[:, None, :]
        difference = (ours.float()[:, :, None] - weights.float()[:, None, :]) * same
        self._common.append(same.float().mean() * chosen.shape[1])
        size = (weights.float()[:, None, :] * same).pow(2).sum().clamp_min(1e-20)
        self._errors.append((difference.pow(2).sum() / size).sqrt())

    def reason(self, limit: float) -> str:
        """Say how our choices differ from the model's own, or return ""."""
        if not self._common:
            return ""
        common = float(torch.stack(self._common).mean())
        if common < _LEAST_COMMON:
            return (
                f"self-test: routers share {common:.2g} of their choices with the model's own "
                f"(at least {_LEAST_COMMON:g})"
            )
        error = float(torch.stack(self._errors).mean())
        if error > limit:
            return (
                f"self-test: weights of experts differ from the model's own by {error:.2g} "
                f"(limit {limit:g})"
            )
        return ""


def _is_rounded(step: DecoderStep) -> bool:
    return step.dtype != torch.float32 and bool(_routers(step))


def _routers(step: DecoderStep) -> list[nn.Module]:
    mlps = [layer.mlp for layer in step.spec.layers]
    return [mlp.router.ref.module for mlp in mlps if isinstance(mlp, ExpertsSpec)]


__all__ = ["ForcedRouting"]
