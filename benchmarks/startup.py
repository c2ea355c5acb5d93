"""What comes before the first token, and what it costs: start-up, graphs, memory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import torch_paged
from benchmarks.decode import GREEDY, timed
from benchmarks.runs import fresh_ids, open_run
from benchmarks.timing import synchronize
from torch_paged.engine.sampler import GreedySampler

_STATM = Path("/proc/self/statm")


def first_token_s(model: Any, prompt: int) -> float:
    """Return seconds from `accelerate()` to the first token of a model that is not accelerated."""
    if torch_paged.is_accelerated(model):
        raise ValueError("the model is accelerated already; call torch_paged.restore(model)")
    start = time.perf_counter()
    torch_paged.accelerate(model, on_unsupported="raise")
    timed(model, 1, 1, prompt, **GREEDY)
    return time.perf_counter() - start


def capture_all(model: Any, buckets: Sequence[int], prompt: int = 8) -> dict[str, float]:
    """Run a first decode step in every bucket; return what the graphs took, from none on."""
    torch_paged.release(model)
    sampler = GreedySampler()
    synchronize(model.device)
    start = time.perf_counter()
    with torch.no_grad():
        for bucket in buckets:
            with open_run(model, fresh_ids(model, bucket, prompt), 4) as run:
                run.first_tokens(run.prefill(), sampler)
                run.launch(sampler)
    synchronize(model.device)
    stats = torch_paged.stats(model)
    return {
        "seconds": time.perf_counter() - start,
        "capture_seconds": stats.capture_seconds,
        "graphs": stats.graphs,
        "megabytes": stats.graph_bytes / 1e6,
    }


def used_bytes(device: torch.device) -> int | None:
    """Return memory in use on the GPU by anyone, or of this process; None where unknown."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    if not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(model: Any, batch: int, new: int, prompt: int) -> dict[str, float]:
    """Return megabytes that decoding takes beside the weights, and what `release` leaves.

    Raises:
        RuntimeError: it is not known here how much memory is in use.
    """
    torch_paged.release(model)
    before = used_bytes(model.device)
    timed(model, batch, new, prompt, **GREEDY)
    stats, during = torch_paged.stats(model), used_bytes(model.device)
    torch_paged.release(model)
    after = used_bytes(model.device)
    if before is None or during is None or after is None:
        raise RuntimeError("how much memory this process uses is known on a GPU and on Linux only")
    taken, ours = during - before, stats.kv_bytes + stats.graph_bytes
    return {
        "weights_mb": sum(p.nbytes for p in model.parameters()) / 1e6,
        "kv_mb": stats.kv_bytes / 1e6,
        "graphs_mb": stats.graph_bytes / 1e6,
        "taken_mb": taken / 1e6,
        "other_mb": (taken - ours) / 1e6,
        "kept_after_release_mb": (after - before) / 1e6,
    }


__all__ = ["capture_all", "first_token_s", "memory", "used_bytes"]
