"""Closed batches below `generate()`: what benchmarks of single steps and prefills start from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import span_ms
from torch_paged.engine.batch import BatchLimits, BatchRun, PackedPrompts
from torch_paged.engine.core import EngineCore
from torch_paged.engine.sampler import Sampler
from torch_paged.generate.registry import find_session


def fresh_ids(model: Any, rows: int, length: int) -> Tensor:
    """Draw prompts [rows, length] that nothing has seen; special ids are left out."""
    vocab_size = model.config.vocab_size
    return torch.randint(
        min(100, vocab_size // 8), vocab_size, (rows, length), device=model.device
    )


def core_of(model: Any) -> EngineCore:
    """Return the engine core of an accelerated model."""
    session = find_session(model)
    if session is None or session.core is None:
        raise ValueError("the model must run on our own step; call torch_paged.accelerate(model)")
    return session.core


def pack(ids: Tensor) -> PackedPrompts:
    """Pack prompts [rows, length] of equal length."""
    rows, length = ids.shape
    positions = torch.arange(length, dtype=torch.int32, device=ids.device)
    return PackedPrompts(
        (length,) * rows,
        ids.reshape(-1),
        None,
        positions.repeat(rows),
        positions[-1:].expand(rows),
    )


def open_run(model: Any, ids: Tensor, max_new_tokens: int) -> BatchRun:
    """Return a run of these prompts, without a host that runs ahead."""
    return BatchRun(core_of(model), pack(ids), BatchLimits(max_new_tokens), lag=0)


def forced_logits(model: Any, ids: Tensor, prompt_len: int) -> Tensor:
    """Feed ids [B, L] to our step, prompt first; float32 logits [B, L - prompt_len, V]."""
    out = []
    with torch.no_grad(), open_run(model, ids[:, :prompt_len], ids.shape[1]) as run:
        out.append(run.prefill().float().clone())
        for at in range(prompt_len, ids.shape[1] - 1):
            run.commit(ids[:, at].contiguous())
            out.append(run.next_logits().float().clone())
    return torch.stack(out, dim=1)


def step_ms(run: BatchRun, sampler: Sampler, steps: int, device: torch.device) -> float:
    """Return milliseconds of one decode step: `steps` of them, launched back to back."""

    def launch() -> None:
        for _ in range(steps):
            run.launch(sampler)

    return span_ms(launch, device) / steps


__all__ = ["core_of", "forced_logits", "fresh_ids", "open_run", "pack", "step_ms"]
