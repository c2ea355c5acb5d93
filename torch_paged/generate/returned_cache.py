"""The cache of a call when its run is over: it keeps the blocks, or gets a copy."""

from __future__ import annotations

from typing import Any

import torch

from torch_paged.decoder.step import DecoderStep
from torch_paged.engine.batch import BatchRun
from torch_paged.engine.core import EngineCore
from torch_paged.generate.leased_cache import CacheLease, Head, View, lend, reusable
from torch_paged.generate.past import Columns, fill_cache
from torch_paged.patches import lease_seams, seams
from torch_paged.patches.patched_step import PatchedStep


def hand_to_cache(
    cache: Any,
    run: BatchRun,
    columns: Columns,
    num_steps: int,
    step: DecoderStep | PatchedStep,
    core: EngineCore,
) -> None:
    """Let the call's cache have what a run computed: in its blocks, where it can do with these.

    The blocks are no longer the run's then, so this is the last that it is asked for.
    """
    if not _can_lease(cache, run, columns, step):
        fill_cache(cache, run, columns, num_steps, step)
        return
    head, real = _head(cache, run, columns, step, core), None
    width = columns.num_past + columns.num_new
    if columns.real is not None and min(run.lengths) < width:
        more = columns.real.new_ones((len(run.lengths), num_steps - 1))
        real = torch.cat([columns.real, more], dim=1)
    view = View(width + num_steps - 1, real, head, step.dtype)
    lease = CacheLease(core.leases, run.lease_blocks(num_steps), view)
    lend(cache, step.cache_layers, lease)
    if columns.lease is not None:
        columns.lease.end_if_left()


def _can_lease(
    cache: Any, run: BatchRun, columns: Columns, step: DecoderStep | PatchedStep
) -> bool:
    """Say whether a cache can show blocks: full keys and values alone, in columns as they were."""
    numbers = step.cache_layers
    if run.keeps == "nothing" or step.has_window or step.keeps_state or not numbers:
        return False
    if step.cache_repeats > 1 or not columns.num_new:
        # Heads are repeated there, or the model has filled it with the prompt itself.
        return False
    if not seams.is_plain_dynamic_cache(cache) or not lease_seams.add_layers(cache, numbers):
        return False
    if seams.cache_length(cache) != columns.num_past:
        return False
    shapes = [lease_seams.state_shapes(cache.layers[number]) for number in numbers]
    if not columns.num_past:
        return all(shape is None or not shape.numel() for pair in shapes for shape in pair)
    return all(
        shape is not None and len(shape) == 4 and shape[2] == columns.num_past
        for pair in shapes
        for shape in pair
    )


def _head(
    cache: Any,
    run: BatchRun,
    columns: Columns,
    step: DecoderStep | PatchedStep,
    core: EngineCore,
) -> Head | None:
    """Return what the cache had before if the blocks have not got all of that."""
    past, numbers = columns.num_past, step.cache_layers
    if not past:
        return None
    lease = columns.lease
    if lease is not None and reusable(cache, numbers, core) is lease:
        head = lease.view.head
        if head is None or head.num_columns <= past:
            return head
        states = tuple((k[:, :, :past], v[:, :, :past]) for k, v in head.states)
        return Head(past, run.cached, states)
    states = tuple(seams.layer_states(cache, number) for number in numbers)
    same = all(s.dtype == step.dtype and s.device == step.device for kv in states for s in kv)
    if same and min(run.cached) == past:
        return None
    return Head(past, run.cached, states)


__all__ = ["hand_to_cache"]
