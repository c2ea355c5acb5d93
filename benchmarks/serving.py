"""Closed batches through an `Engine`, where random numbers go by seed and position.

`generate()` draws as Hugging Face does, from torch's generator and in the order of the rows; an
engine draws each row by its own seed and position. Which of the two runs is decided by the door.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

import torch_paged
from benchmarks.parity import WrongResult
from benchmarks.runs import fresh_ids
from benchmarks.timing import differenced, synchronize


def generate(engine: torch_paged.Engine, ids: Tensor, new: int, **kwargs: Any) -> Tensor:
    """Return prompts [B, P] with `new` tokens each; with `seed`, row i draws by seed + i."""
    names = _add(engine, ids.tolist(), new, kwargs)
    outputs = engine.run()
    rows = [list(outputs[name].token_ids) for name in names]
    if any(len(row) != new for row in rows):
        raise WrongResult(f"an engine returned {sorted(map(len, rows))} tokens, {new} asked for")
    return torch.cat([ids, torch.tensor(rows, device=ids.device)], dim=1)


def timed(
    engine: torch_paged.Engine, model: Any, batch: int, new: int, prompt: int, **kwargs: Any
) -> float:
    """Return seconds in which fresh requests, all there at the start, have ended."""
    prompts = fresh_ids(model, batch, prompt).tolist()
    synchronize(model.device)
    start = time.perf_counter()
    _add(engine, prompts, new, kwargs)
    outputs = engine.run()
    synchronize(model.device)
    seconds = time.perf_counter() - start
    count = sum(len(out.token_ids) for out in outputs.values())
    if count != batch * new:
        raise WrongResult(f"an engine returned {count} tokens, {batch * new} were asked for")
    return seconds


def measure(
    engine: torch_paged.Engine,
    model: Any,
    batch: int,
    new: int,
    repeats: int,
    prompt: int,
    **kwargs: Any,
) -> dict[str, float]:
    """Return differenced and end-to-end ms per token of a batch that starts together."""

    def call(tokens: int) -> float:
        return timed(engine, model, batch, tokens, prompt, **kwargs)

    # Steps that mix prompts with decoding rows come in long calls alone, and are captured when
    # they are met for the fourth time.
    return differenced(call, new, repeats, warm_ups=4)


def _add(
    engine: torch_paged.Engine, prompts: list[list[int]], new: int, kwargs: dict[str, Any]
) -> list[Any]:
    seed = kwargs.get("seed")
    names = []
    for row, prompt in enumerate(prompts):
        own = kwargs if seed is None else kwargs | {"seed": seed + row}
        names.append(engine.add_request(prompt, max_new_tokens=new, **own))
    return names


__all__ = ["generate", "measure", "timed"]
