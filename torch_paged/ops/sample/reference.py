"""The op in plain torch, with the same random numbers as the kernels; also the CPU kernel."""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10
_INF = float("inf")


def philox(key: torch.Tensor, counter: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the four words of Philox-4x32-10, each uint32 held in int64.

    Args:
        key: int64, 64 bits.
        counter: four int64 tensors of uint32 values; all broadcast together.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(_NUM_ROUNDS):
        # The product wraps to 64 bits; the mask after the arithmetic shift gives its high word.
        product_a, product_b = c0 * _MULTIPLIER_A, c2 * _MULTIPLIER_B
        c0, c2 = ((product_b >> 32) & _MASK) ^ c1 ^ k0, ((product_a >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = product_b & _MASK, product_a & _MASK
        k0, k1 = (k0 + _WEYL_A) & _MASK, (k1 + _WEYL_B) & _MASK
    return c0, c1, c2, c3


def exponentials(seeds: torch.Tensor, counters: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return Exp(1) numbers [num_rows, vocab_size], a function of (seed, counter, token)."""
    block = torch.arange(-(-vocab_size // 4), device=seeds.device)[None, :]
    count = counters.long()[:, None]
    counter = (block, count & _MASK, (count >> 32) & _MASK, torch.zeros_like(block))
    words = torch.stack(philox(seeds[:, None], counter), dim=-1)
    bits = words.flatten(1)[:, :vocab_size].float()
    u = ((bits + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    # -log(1 - u); the series keeps the digits of a small u, which decide between many tokens.
    series = u * (1.0 + u * (0.5 + u * (1 / 3 + u * 0.25)))
    return torch.where(u < 1 / 64, series, -torch.log(1.0 - u))


def _support(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return which scores survive top-k, then top-p, then min-p, bool [num_rows, vocab_size]."""
    vocab_size = scores.shape[1]
    by_k = (top_k > 0) & (top_k < vocab_size)
    by_p = top_p < 1.0
    keep = torch.ones_like(scores, dtype=torch.bool)
    if bool((by_k | by_p).any()):
        ascending, order = torch.sort(scores, dim=1, stable=True)
        rank = torch.where(by_k, vocab_size - top_k, 0).long()[:, None]
        kept = ascending >= ascending.gather(1, rank)
        # Equal scores at the edge of top-p: the ones at higher indices stay, as a stable sort has.
        cumulative = ascending.masked_fill(~kept, -_INF).softmax(dim=1).cumsum(dim=1)
        outside = cumulative <= (1.0 - top_p.double()).float()[:, None]
        outside[:, -1] = False
        kept &= ~(outside & by_p[:, None])
        keep.scatter_(1, order, kept)
    weights = (scores - scores.amax(dim=1, keepdim=True)).exp()
    return keep & ~(weights < min_p.float()[:, None])


def sample_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
    drawn_from: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token a row; the module's docstring defines it.

    Args:
        drawn_from: [num_rows, vocab_size] float32, where the drawn rows' scores are written, -inf
            outside of the support.
    """
    slot = slots.clamp(min=0).long()
    logits = logits.float()
    tokens = torch.argmax(logits, dim=1).masked_fill_(slots < 0, 0)
    temperatures = temperature[slot].float()
    scales = 1.0 / temperatures
    largest = logits.amax(dim=1) * scales
    sampled = (slots >= 0) & (temperatures > 0) & (largest.abs() < _INF)
    rows = torch.nonzero(sampled)[:, 0]
    if rows.numel() > 0:
        slot = slot[rows]
        scores = logits[rows] * scales[rows, None]
        keep = _support(scores, top_k[slot], top_p[slot], min_p[slot])
        weights = (scores - scores.amax(dim=1, keepdim=True)).exp()
        if drawn_from is not None:
            drawn_from[rows] = scores.masked_fill(~keep, -_INF)
        race = weights / exponentials(seeds[slot], counters[slot], logits.shape[1])
        tokens[rows] = torch.argmax(race.masked_fill_(~keep, -1.0), dim=1)
    return tokens


def sample_with_scores_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    counters: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row, and return the scores that it was drawn from."""
    scores = logits.to(torch.float32, copy=True)
    state = (temperature, top_k, top_p, min_p, seeds, counters)
    return sample_reference(logits, slots, *state, drawn_from=scores), scores
