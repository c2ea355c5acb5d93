"""Host microseconds of an engine step, its device work left out.

The model's step is replaced by one that counts; scheduling, block updates, reports and hand-out
run as they are. Prints a line per batch: microseconds of a step of `run()`, and what each token
costs on top when every token is handed out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torch_paged
from torch_paged.generate.registry import find_session

_WARM_UP = 40


def tiny_model() -> Any:
    """Return a model whose forward runs for the first steps alone, and never says an end token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


class _Counting:
    """A runner whose decode steps only count."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def serve(self, rows: Any, tail: Any) -> None:
        """Do nothing: the report keeps saying that no row has ended."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def microseconds(batch: int, steps: int, *, tokens: bool) -> float:
    """Return the median host time of a step of `batch` rows."""
    with torch_paged.Engine(tiny_model(), max_num_seqs=batch, verify=False) as engine:
        session = find_session(engine._target)
        assert session is not None and session.core is not None
        core = session.core
        core.prepare(batch, 1, 1)
        core.make_room(batch * (-(-(steps + 64) // 16)))
        for i in range(batch):
            # Prompts of all lengths modulo the block size, so that blocks fill at any step.
            engine.add_request([3] * (1 + i % 16), max_new_tokens=steps + 100)
        advance: Callable[..., Any] = engine._service.advance
        for _ in range(4):
            advance(tokens=tokens)
        runner = _Counting(core.runner())
        core.runner = lambda: runner  # type: ignore[method-assign]
        times = []
        for step in range(_WARM_UP + steps):
            started = time.perf_counter()
            advance(tokens=tokens)
            if step >= _WARM_UP:
                times.append(time.perf_counter() - started)
            if engine.is_idle:
                raise RuntimeError("the requests ended early")
    return 1e6 * statistics.mean(sorted(times)[: int(0.98 * len(times))])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("batch   us/step of run()   us/step of step()   us per token handed out")
    for batch in args.batches:
        quiet = microseconds(batch, args.steps, tokens=False)
        loud = microseconds(batch, args.steps, tokens=True)
        print(f"{batch:5d} {quiet:18.0f} {loud:19.0f} {(loud - quiet) / batch:25.2f}")


if __name__ == "__main__":
    main()
