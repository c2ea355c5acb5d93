"""Many short requests with random cancels and failures: `python -m benchmarks.soak --help`.

Every output is compared with what the request says alone. Fails if a request is lost, doubled or
wrong, if blocks or slots are left held, or if memory keeps growing.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import resource
import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torch_paged
from torch_paged.generate.registry import find_session

VOCAB = 32
LENGTHS = (1, 5, 8, 9, 17)
NUM_TOKENS = (1, 2, 5)
KINDS: list[dict[str, Any]] = [
    {},
    {"eos_token_id": [3, 7, 11, 12]},
    {"repetition_penalty": 1.7},
    {"do_sample": True, "seed": 5, "temperature": 1.5},
]
_IN_LINE = 32


def tiny_model() -> Any:
    """Return a model that decodes in a fraction of a millisecond."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.35,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def prompt(length: int, seed: int) -> list[int]:
    """Return one of the few prompts, so that prefixes meet."""
    draw = random.Random(1000 * length + seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


Question = tuple[int, int, int, int]  # length, seed, number of tokens, kind


def answers(model: Any) -> dict[Question, list[int]]:
    """Ask every question once, alone."""
    known = {}
    with torch_paged.Engine(model, block_size=8) as engine:
        for length in LENGTHS:
            for seed in range(2):
                for count in NUM_TOKENS:
                    for kind, kwargs in enumerate(KINDS):
                        name = engine.add_request(
                            prompt(length, seed), max_new_tokens=count, **kwargs
                        )
                        tokens = list(engine.run()[name].token_ids)
                        known[length, seed, count, kind] = tokens
    return known


class Chaos:
    """Lets prefills fail and yield NaN, and callbacks raise, by chance."""

    def __init__(self, core: Any, draw: random.Random) -> None:
        self._prefill = core.step.prefill
        self._draw = draw
        core.step.prefill = self.prefill

    def prefill(self, inputs: Any) -> torch.Tensor:
        if self._draw.random() < 0.01:
            raise torch.OutOfMemoryError("by chance")
        logits: torch.Tensor = self._prefill(inputs)
        if self._draw.random() < 0.01:
            logits[0] = float("nan")
        return logits

    def on_output(self, out: torch_paged.RequestOutput) -> None:
        if self._draw.random() < 0.05:
            raise ValueError("by chance")


def soak(model: Any, num_requests: int, seed: int) -> dict[str, int]:
    """Run the requests and return how many ended for which reason."""
    draw = random.Random(seed)
    known = answers(model)
    ends: dict[str, int] = {}
    with torch_paged.Engine(
        model, block_size=8, max_num_seqs=16, lag=2, cuda_graphs=False
    ) as engine:
        session = find_session(engine._target)
        assert session is not None and session.core is not None
        core = session.core
        core.prepare(1, 1, 1)
        core.pool.max_bytes = 40 * core.pool.block_bytes
        chaos = Chaos(core, draw)
        asked: dict[int, Question] = {}
        num_added = num_done = 0
        while num_added < num_requests or not engine.is_idle:
            while num_added < num_requests and len(asked) < _IN_LINE:
                question = (
                    draw.choice(LENGTHS),
                    draw.randrange(2),
                    draw.choice(NUM_TOKENS),
                    draw.randrange(len(KINDS)),
                )
                engine.add_request(
                    prompt(*question[:2]),
                    max_new_tokens=question[2],
                    request_id=num_added,
                    on_output=chaos.on_output if draw.random() < 0.1 else None,
                    deadline=0.0 if draw.random() < 0.01 else None,
                    **KINDS[question[3]],
                )
                asked[num_added] = question
                num_added += 1
            if draw.random() < 0.05 and asked:
                engine.cancel(draw.choice(list(asked)))
            for out in engine.step():
                if not out.finished:
                    continue
                expected = known[asked.pop(out.request_id)]  # type: ignore[index, arg-type]
                tokens = list(out.token_ids)
                if out.finish_reason in ("cancelled", "error"):
                    expected = expected[: len(tokens)]
                assert tokens == expected, (out, expected)
                ends[str(out.finish_reason)] = ends.get(str(out.finish_reason), 0) + 1
                num_done += 1
                if num_done % 2000 == 0:
                    engine.check_integrity()
                    print(f"{num_done:,} done, {_megabytes():.0f} MB, {ends}", flush=True)
        assert num_done == num_requests and not asked, "a request was lost"
        engine.check_integrity()
        assert core.allocator.num_live == 0 and core.slots.num_free == core.slots.num_slots
    return ends


def _megabytes() -> float:
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def main() -> None:
    """Soak twice; the second time must need no more memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # The failures are ours: each would be logged with its traceback.
    logging.getLogger("torch_paged").setLevel(logging.CRITICAL)
    model = tiny_model()
    soak(model, min(args.requests, 1000), args.seed + 1)
    gc.collect()
    before, started = _megabytes(), time.perf_counter()
    ends = soak(model, args.requests, args.seed)
    seconds, grown = time.perf_counter() - started, _megabytes() - before
    print(f"{args.requests:,} requests in {seconds:.0f} s, {grown:.1f} MB more, {ends}")
    assert grown < 64, "memory keeps growing"


if __name__ == "__main__":
    main()
