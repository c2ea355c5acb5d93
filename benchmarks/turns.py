"""What a returned cache costs, and the turn behind it: `python -m benchmarks.turns --models 8b`.

A line for each form of the cache: its blocks kept, and its tensors copied out and in again as a
model without leases has to. Milliseconds of a call of two tokens over a prompt, and of the next
call, which gets the cache and 16 more ids: until the call is back (host), and until the device has
done all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

import torch_paged
from benchmarks import shapes
from benchmarks.runs import fresh_ids
from benchmarks.timing import default_device, synchronize
from torch_paged.generate import returned_cache
from torch_paged.patches import seams

_NEW_IDS = 16
_WARM_UP = 3


class Times(NamedTuple):
    """Median milliseconds of the two calls: host, then everything."""

    first_host: float
    first: float
    next_host: float
    next: float


@contextlib.contextmanager
def copied() -> Iterator[None]:
    """Within the block a returned cache is filled at once."""
    with mock.patch.object(returned_cache, "_can_lease", lambda *args: False):
        yield


def _timed(model: Any, ids: torch.Tensor, **kwargs: Any) -> tuple[Any, float, float]:
    synchronize(model.device)
    started = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=2,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        **kwargs,
    )
    host = time.perf_counter() - started
    synchronize(model.device)
    return out, 1e3 * host, 1e3 * (time.perf_counter() - started)


def two_turns(model: Any, batch: int, context: int) -> Times:
    """Time a call over fresh ids, and the next turn."""
    ids = fresh_ids(model, batch, context)
    out, *first = _timed(model, ids)
    cache = next(out[name] for name in seams.CACHE_NAMES if out.get(name) is not None)
    following = torch.cat([out.sequences, fresh_ids(model, batch, _NEW_IDS)], 1)
    name = next(n for n in seams.CACHE_NAMES if n in seams.forward_arguments(model))
    _, *second = _timed(model, following, **{name: cache})
    return Times(*first, *second)


def measure(model: Any, batch: int, context: int, repeats: int) -> Times:
    """Return medians."""
    times = [two_turns(model, batch, context) for _ in range(_WARM_UP + repeats)][_WARM_UP:]
    return Times(*(statistics.median(values) for values in zip(*times, strict=True)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["0.6b"], choices=[*shapes.NAMES, "tiny"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    device = default_device()
    print("model batch context form      first call: host, all   next turn: host, all (ms)")
    for name in args.models:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        model = shapes.build(name, device=device, dtype=dtype)
        torch_paged.accelerate(model, on_unsupported="raise", verify=False)
        for batch in args.batches:
            for context in args.contexts:
                for form in ("lease", "copied"):
                    with copied() if form == "copied" else contextlib.nullcontext():
                        t = measure(model, batch, context, args.repeats)
                    print(
                        f"{name:5} {batch:5d} {context:7d} {form:6} {t.first_host:17.2f} "
                        f"{t.first:7.2f} {t.next_host:16.2f} {t.next:7.2f}",
                        flush=True,
                    )
        torch_paged.restore(model)
        del model
        gc.collect()


if __name__ == "__main__":
    main()
