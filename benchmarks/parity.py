"""Whether results are right, asked before anything is timed.

Tokens come from the very calls that are timed. Fed back to Hugging Face's eager attention in
float32, they show by how much each misses the best logit; logits of our step over the same tokens
are compared with those, and so are Hugging Face's own in the model's dtype: its rounding error is
the measure of ours. Random weights have near ties everywhere, so tokens alone say nothing there.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.runs import forced_logits
from torch_paged.patches.attention_seams import eager_attention
from torch_paged.patches.seams import forward_arguments

MAX_RMS_RATIO, MAX_PEAK_RATIO = 1.25, 2.0
# In float32 both sides round in the last bits only; in units of the logits' deviation.
_FLOAT32_ERROR = 1e-4
# Tokens of one forward of the oracle, and of a chunk where the context is longer than that.
_FORWARD_TOKENS, _CHUNK_TOKENS = 4096, 1024


class WrongResult(RuntimeError):
    """A result that must not be timed."""


class Warp(NamedTuple):
    """What a sampled token must have survived."""

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 0.9


def hf_logits(model: Any, ids: Tensor, prompt_len: int) -> Tensor:
    """Return float32 logits [B, L - prompt_len, V] of the model's own forward, eager attention."""
    rows_at_once = max(1, _FORWARD_TOKENS // ids.shape[1])
    forward = _forward if ids.shape[1] <= _FORWARD_TOKENS else _chunked_forward
    with torch.no_grad(), eager_attention(model):
        parts = [forward(model, rows, prompt_len) for rows in ids.split(rows_at_once)]
    return torch.cat(parts)


def _forward(model: Any, ids: Tensor, prompt_len: int) -> Tensor:
    keep = ids.shape[1] - prompt_len
    return model(ids[:, :-1], use_cache=False, logits_to_keep=keep).logits.float()


def _chunked_forward(model: Any, ids: Tensor, prompt_len: int) -> Tensor:
    """Like `_forward`, for contexts whose matrix of scores would not fit."""
    name = "cache" if "cache" in forward_arguments(model) else "past_key_values"
    cache, logits = None, []
    parts = [*ids[:, : prompt_len - 1].split(_CHUNK_TOKENS, dim=1), ids[:, prompt_len - 1 : -1]]
    for index, part in enumerate(parts):
        keep = 0 if index == len(parts) - 1 else 1
        out = model(part, **{name: cache}, use_cache=True, logits_to_keep=keep)
        cache = getattr(out, name)
        if keep == 0:
            logits.append(out.logits.float())
    return torch.cat(logits, dim=1)


class Oracle:
    """A float32 copy of a model, for as long as the block lasts. The model may be accelerated."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._exact: Any = None
        # Of the newest ids, which are often asked about twice.
        self._known: tuple[Tensor, int, tuple[Tensor, float, Tensor | None]] | None = None

    def __enter__(self) -> Oracle:
        if self._model.dtype != torch.float32:
            with torch.no_grad():
                self._exact = copy.deepcopy(self._model).float()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._exact = self._known = None
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def check_greedy(self, ids: Tensor, prompt_len: int, what: str) -> dict[str, float]:
        """Check the tokens that followed prompts in ids [B, L]; return how far off they were.

        Raises:
            WrongResult: the message says what was wrong, by how much, and what was allowed.
        """
        exact, allowed = self._references(ids, prompt_len, what)[:2]
        chosen = exact.gather(-1, ids[:, prompt_len:, None])[..., 0]
        gap = exact.max(-1).values - chosen
        _require(gap, allowed, what, "greedy token misses the best logit by")
        return {"token_gap": float(gap.max()), "token_gap_allowed": allowed}

    def check_sampled(
        self, ids: Tensor, prompt_len: int, warp: Warp, what: str
    ) -> dict[str, float]:
        """Check that sampled tokens are among those that the warpers leave over.

        Raises:
            WrongResult: as for `check_greedy`.
        """
        exact, allowed = self._references(ids, prompt_len, what)[:2]
        slack = allowed / warp.temperature
        scores = exact / warp.temperature
        best = scores.topk(min(warp.top_k, scores.shape[-1])).values
        chosen = scores.gather(-1, ids[:, prompt_len:, None])
        _require((best[..., -1:] - chosen)[..., 0], slack, what, "token is outside of top-k by")
        # The mass of what is better for certain, at the least that it can have been.
        better = (best.softmax(-1) * (best > chosen + slack)).sum(-1)
        mass = better * math.exp(-slack)
        _require(mass, warp.top_p, what, "token is outside of top-p: better ones have")
        return {"better_mass": float(mass.max()), "token_gap_allowed": allowed}

    def check_logits(self, ids: Tensor, prompt_len: int, what: str) -> dict[str, float]:
        """Hold the logits of our step over ids [B, L] to the error of Hugging Face's own.

        Raises:
            WrongResult: the error is larger than the rule allows.
        """
        exact, allowed, theirs = self._references(ids, prompt_len, what)
        ours = forced_logits(self._model, ids, prompt_len)
        if not torch.isfinite(ours).all():
            raise WrongResult(f"{what}: logits are not finite")
        ours -= exact
        if theirs is None:
            _require(ours.abs().amax(-1), allowed, what, "float32 logit differs by")
            return {"logit_error": float(ours.abs().max()), "logit_error_allowed": allowed}
        rms = float(ours.pow(2).mean().sqrt() / theirs.pow(2).mean().sqrt())
        peak = float(ours.abs().max() / theirs.abs().max())
        for name, ratio, limit in (("RMS", rms, MAX_RMS_RATIO), ("largest", peak, MAX_PEAK_RATIO)):
            if not ratio <= limit:
                raise WrongResult(
                    f"{what}: {name} logit error is {ratio:.2f} times Hugging Face's own in "
                    f"{self._model.dtype}, at most {limit} is right"
                )
        return {"rms_ratio": rms, "peak_ratio": peak, "positions": ours[..., 0].numel()}

    def _references(
        self, ids: Tensor, prompt_len: int, what: str
    ) -> tuple[Tensor, float, Tensor | None]:
        """Return exact logits, what a token may miss, and Hugging Face's error, None if exact."""
        if self._known is None or self._known[0] is not ids or self._known[1] != prompt_len:
            self._known = None  # first, for the memory
            self._known = (ids, prompt_len, self._ask(ids, prompt_len, what))
        return self._known[2]

    def _ask(self, ids: Tensor, prompt_len: int, what: str) -> tuple[Tensor, float, Tensor | None]:
        exact = hf_logits(self._exact or self._model, ids, prompt_len)
        if not torch.isfinite(exact).all():
            raise WrongResult(f"{what}: Hugging Face's float32 logits are not finite")
        if self._exact is None:
            return exact, float(_FLOAT32_ERROR * exact.std()), None
        theirs = hf_logits(self._model, ids, prompt_len) - exact
        return exact, 2 * float(theirs.abs().max()), theirs


def _require(values: Tensor, limit: float, what: str, text: str) -> None:
    """Raise at the first of values [B, N] above the limit."""
    wrong = ~(values <= limit)
    if wrong.any():
        row, at = wrong.nonzero()[0].tolist()
        raise WrongResult(
            f"{what}: row {row}, new token {at}: {text} {float(values[row, at]):.4g}, at most "
            f"{limit:.4g} is right ({int(wrong.sum())} of {wrong.numel()} are wrong)"
        )


__all__ = ["Oracle", "Warp", "WrongResult", "hf_logits"]
