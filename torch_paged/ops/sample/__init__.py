"""Sampling with per-slot parameters and counter-based random numbers.

For row b with slot s = slots[b] >= 0, in fp32 and in Hugging Face's order of warpers::

    score[i]  = logit[i] * (1 / temperature[s])
    top_k     keeps scores >= the k-th largest (all ties); off for k <= 0 or k >= vocab_size
    top_p     keeps the largest scores, least first cut while the sum of their probabilities is
              at most 1 - p; equal scores are cut from the lowest index; off for p >= 1; one stays
    min_p     keeps probabilities >= min_p * the largest; off for min_p <= 0
    token[b]  = argmax over what is kept of exp(score[i]) / e[i]

which draws token i with its probability, e[i] being exponential with mean 1. e[i] depends on
(seeds[s], counters[s], i) alone, through Philox-4x32-10, hence a row's token depends neither on
the batch nor on the row's place in it. Temperature 0 means argmax(logit), as it does where no
distribution exists: a NaN or +inf logit, all -inf, or a temperature so small that scores overflow.

No sort: `least`, the smallest kept logit, is found by a search over its bits (see kernels.py).
"""

from __future__ import annotations

import torch

from torch_paged.ops.logits import check_logits, check_slots
from torch_paged.ops.registration import register_op
from torch_paged.ops.sample.launch import _launch_sample, _launch_sample_with_scores
from torch_paged.ops.sample.reference import sample_reference, sample_with_scores_reference

_FLOATS = (torch.float32, torch.float64)
_INTS = (torch.int32, torch.int64)
_STATE: dict[str, tuple[torch.dtype, ...]] = {
    "temperature": _FLOATS,
    "top_k": _INTS,
    "top_p": _FLOATS,
    "min_p": _FLOATS,
    "seeds": (torch.int64,),
    "counters": _INTS,
}


def _sample_fake(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


def _sample_with_scores_fake(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = logits.new_empty(logits.shape[0], dtype=torch.int64)
    return tokens, logits.new_empty(logits.shape, dtype=torch.float32)


_sample_op = register_op(
    "sample(Tensor logits, Tensor slots, Tensor temperature, Tensor top_k, Tensor top_p, "
    "Tensor min_p, Tensor seeds, Tensor counters) -> Tensor",
    cpu=sample_reference,
    cuda=_launch_sample,
    fake=_sample_fake,
)


_sample_with_scores_op = register_op(
    "sample_with_scores(Tensor logits, Tensor slots, Tensor temperature, Tensor top_k, "
    "Tensor top_p, Tensor min_p, Tensor seeds, Tensor counters) -> (Tensor, Tensor)",
    cpu=sample_with_scores_reference,
    cuda=_launch_sample_with_scores,
    fake=_sample_with_scores_fake,
)


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
) -> torch.Tensor:
    """Draw one token a row, int64 [num_rows]; a padding row gives 0.

    Args:
        logits: [num_rows, vocab_size], float32, bfloat16 or float16; contiguous in the last
            dimension, row stride free.
        slots: [num_rows] int32, -1 for a padding row; copied if it is not contiguous.
        temperature: [num_slots] float32 or float64; 0 is greedy. Contiguous, as all below.
        top_k: [num_slots] int32 or int64; 0 or at least vocab_size filters nothing.
        top_p: [num_slots] float32 or float64; 1 filters nothing. Hugging Face takes ``1 - top_p``
            in double precision, which float64 reproduces.
        min_p: [num_slots] float32 or float64; 0 filters nothing.
        seeds: [num_slots] int64.
        counters: [num_slots] int32 or int64, the slot's `num_generated`: a new value a step.
    """
    state = (temperature, top_k, top_p, min_p, seeds, counters)
    if not torch.compiler.is_compiling():
        _check(logits, slots, state)
    return _sample_op(logits, slots.contiguous(), *state)


def sample_with_scores(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `sample` does, and return what it drew from, float32 [num_rows, vocab_size].

    That is ``score`` where a token is kept and -inf where it is not; the logits in a row that is
    not drawn, or is padding.
    """
    state = (temperature, top_k, top_p, min_p, seeds, counters)
    if not torch.compiler.is_compiling():
        _check(logits, slots, state)
    tokens, scores = _sample_with_scores_op(logits, slots.contiguous(), *state)
    return tokens, scores


def _check(logits: torch.Tensor, slots: torch.Tensor, states: tuple[torch.Tensor, ...]) -> None:
    check_logits(logits)
    check_slots(slots, logits.shape[0])
    num_slots = states[0].shape[0]
    for (name, dtypes), state in zip(_STATE.items(), states, strict=True):
        fits = state.shape == (num_slots,) and state.is_contiguous()
        if state.dtype not in dtypes or not fits:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise TypeError(
                f"{name} must be {wanted} [{num_slots}], contiguous, got {state.dtype} "
                f"{list(state.shape)} with strides {state.stride()}"
            )


__all__ = ["sample", "sample_reference", "sample_with_scores", "sample_with_scores_reference"]
