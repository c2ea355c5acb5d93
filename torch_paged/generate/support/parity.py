"""Whether one model generates, accelerated, what Hugging Face generates; and in which tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torch_paged.generate.accelerate import accelerate, explain, restore
from torch_paged.generate.support.zoo import VOCAB, tiny_model
from torch_paged.generate.support.zoo_fixes import NOT_BUILT
from torch_paged.patches.attention_seams import eager_attention
from torch_paged.patches.families import NO_ROW
from torch_paged.report import Report

PROMPTS = (5, 13, 21)
NEW_TOKENS = 16  # the longest row ends in its third block of 16
# Rows are compared up to the first step whose two best logits are nearer than this.
NEAR_TIE = 2e-4
LEAST_COMPARED = 6

Tier = Literal["fused", "patched", "eager", "-"]
Result = Literal["equal", "differs", "undecided", "fails", "not built"]


@dataclass(frozen=True, slots=True)
class Row:
    """One type in the table.

    Attributes:
        tier: in which the batch ran; "-" if it did not.
        result: of the comparison with Hugging Face's eager attention.
        why: why the tier is no higher, where the tokens part, or what went wrong.
    """

    model_type: str
    tier: Tier
    result: Result
    why: str = ""

    @property
    def is_fault(self) -> bool:
        """Say whether this must not be: a type that merely is not built does no harm."""
        return self.result in ("differs", "undecided", "fails")


def prompts(device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return ids and mask [3, 21] of a batch that is padded on the left."""
    width = max(PROMPTS)
    ids = torch.zeros(len(PROMPTS), width, dtype=torch.long, device="cpu")
    for row, length in zip(ids, PROMPTS, strict=True):
        generator = torch.Generator().manual_seed(length)
        row[width - length :] = torch.randint(
            3, VOCAB, (length,), generator=generator, device="cpu"
        )
    ids = ids.to(device)
    return ids, (ids != 0).long()


def steps_to_compare(logits: Tensor) -> list[int]:
    """Return for each row of logits [steps, rows, vocab] how many tokens no near tie decides."""
    best = logits.float().topk(2, -1).values
    near = best[..., 0] - best[..., 1] < NEAR_TIE
    return [int(row.nonzero()[0]) if row.any() else len(row) for row in near.T]


def row_of(model_type: str, device: torch.device | str) -> Row:
    """Build the tiny model of a type and compare it; never raises for what the model does."""
    if model_type in NOT_BUILT:
        return Row(model_type, "-", "not built", NOT_BUILT[model_type])
    try:
        model = tiny_model(model_type).to(device)
    except Exception as error:  # any type's own, on a config this small
        return Row(model_type, "-", "not built", _told(error))
    return compare(model, model_type)


def compare(model: Any, model_type: str) -> Row:
    """Generate greedily with and without us, and compare the tokens; restores the model."""
    try:
        with eager_attention(model):
            expected = _generate(model, output_logits=True, return_dict_in_generate=True)
    except Exception as error:
        return Row(model_type, "-", "not built", f"Hugging Face's own generate: {_told(error)}")
    try:
        accelerate(model)
        got = _generate(model)
        report = explain(model)
    except Exception as error:
        return Row(model_type, "-", "fails", _told(error))
    finally:
        restore(model)
    result, why = compare_tokens(got, expected.sequences, torch.stack(expected.logits))
    return Row(model_type, _tier(report), result, why or _reasons(report))


def _tier(report: Report) -> Tier:
    """Return the tier in which the call ran; a single call may fall back in any."""
    if report.last_call is not None and report.last_call.path == "eager":
        return "eager"
    return report.tier


def _reasons(report: Report) -> str:
    reasons: Sequence[str] = report.reasons
    if _tier(report) == "eager" and report.last_call is not None:
        reasons = report.last_call.reasons
    # That there is no row goes without saying below the fused tier.
    return "; ".join(reason for reason in reasons if not reason.startswith(NO_ROW))


def _generate(model: Any, **kwargs: Any) -> Any:
    ids, mask = prompts(model.device)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **kwargs
    )


def compare_tokens(got: Tensor, expected: Tensor, logits: Tensor) -> tuple[Result, str]:
    """Compare sequences [rows, tokens], each row up to the first near tie of `logits`."""
    prompt = expected.shape[1] - logits.shape[0]
    for row, steps in enumerate(steps_to_compare(logits)):
        same = got[row, prompt : prompt + steps] == expected[row, prompt : prompt + steps]
        if not same.all():
            return "differs", f"row {row} parts at new token {int((~same).nonzero()[0])}"
        if steps < LEAST_COMPARED:
            return "undecided", f"a near tie decides row {row} at new token {steps}"
    return "equal", ""


def _told(error: Exception) -> str:
    first, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first}"


__all__ = [
    "LEAST_COMPARED",
    "NEAR_TIE",
    "NEW_TOKENS",
    "PROMPTS",
    "Row",
    "compare",
    "compare_tokens",
    "prompts",
    "row_of",
    "steps_to_compare",
]
