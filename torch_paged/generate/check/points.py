"""One value of ours beside Hugging Face's, and how far apart they may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Root mean square of a token's difference over that of its value, when one op is given the same
# inputs on both sides. Over all types of transformers 5.24, tiny, rounding reaches 5e-7, 5e-3 and
# 5e-2; a wrong norm, angle or scale lands at 0.1 and above.
LIMITS = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
# A token whose values nearly cancel is held against this part of the whole tensor's size.
_SMALLEST_TOKEN = 1e-2


@dataclass(frozen=True, slots=True)
class Point:
    """One comparison.

    Attributes:
        phase: "prefill" or "decode".
        title: what is compared, the same for all layers.
        layer: its index; None outside the layers.
        place: where the other value comes from: a module of the model.
        op: the instruction, or the class of the module, that made our value.
        max_abs: largest difference; infinite where the shapes differ.
        relative: see `LIMITS`; of the worst token.
    """

    phase: str
    title: str
    layer: int | None
    place: str
    op: str
    max_abs: float
    relative: float
    limit: float

    @property
    def parts(self) -> bool:
        """Say whether the values are too far apart; what is not a number is."""
        return not self.relative <= self.limit

    @property
    def where(self) -> str:
        """Name the point: ``layer 3, attention``."""
        return self.title if self.layer is None else f"layer {self.layer}, {self.title}"


def match(theirs: Tensor, ours: Tensor) -> Tensor | None:
    """Return `theirs` [..., width] with the shape of `ours` [tokens, width], or None.

    Where ours has fewer tokens, they are the last ones.
    """
    rows = theirs.reshape(-1, theirs.shape[-1]) if theirs.dim() else theirs.reshape(1, 1)
    flat = ours.reshape(-1, ours.shape[-1])
    if rows.shape[1] != flat.shape[1] or rows.shape[0] < flat.shape[0]:
        return None
    return rows[rows.shape[0] - flat.shape[0] :].reshape(ours.shape)


def measure(ours: Tensor, theirs: Tensor | None) -> tuple[float, float]:
    """Return the largest difference and that of the worst token, relative to the token."""
    if theirs is None:
        return math.inf, math.inf
    if ours.numel() == 0:
        return 0.0, 0.0
    if theirs.is_complex():
        ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
    expected = theirs.float().reshape(-1, theirs.shape[-1])
    difference = ours.float().reshape(expected.shape) - expected
    sizes = expected.pow(2).mean(-1).sqrt()
    floor = expected.pow(2).mean().sqrt() * _SMALLEST_TOKEN
    relative = difference.pow(2).mean(-1).sqrt() / sizes.maximum(floor).clamp_min(1e-20)
    return float(difference.abs().max()), float(relative.max())


__all__ = ["LIMITS", "Point", "match", "measure"]
