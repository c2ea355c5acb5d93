"""Tokens a second with and without candidates: `python -m benchmarks.speculation --help`.

No two models with random weights agree on anything, so agreement is made: the target's weights are
set so that its greedy token depends on the last one alone, by a wide margin, and each candidate is
replaced by the target's own token with probability `--agreement`, by another one otherwise. All
else is as it would be: the draft model computes its candidates, at its own cost and with its own
cache, transformers' candidate generators hand them over, and the target verifies them at its true
shape. The tokens are checked against plain decoding before anything is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torch_paged
from benchmarks import shapes
from benchmarks.decode import GREEDY, generate
from benchmarks.timing import default_device, differenced, synchronize

_CYCLE = 61  # tokens until the target repeats itself: a prompt lookup finds what comes next


def decisive(model: Any) -> Tensor:
    """Set weights so that token i is followed by ``following[i]``; return that [vocab_size]."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    vocab_size = embedding.shape[0]
    index = torch.arange(vocab_size, device=embedding.device)
    start = index // _CYCLE * _CYCLE
    length = (vocab_size - start).clamp(max=_CYCLE)
    following = start + (index - start + 1) % length
    with torch.no_grad():
        # Far above what the layers add, so that the hidden state is still that of the token.
        embedding.normal_(std=64.0)
        head[following] = embedding / 3200
    return following


def continued(following: Tensor, first: int, length: int) -> Tensor:
    """Return ids [1, length] of what the target says from `first` on."""
    ids = [first]
    table = following.tolist()
    while len(ids) < length:
        ids.append(table[ids[-1]])
    return torch.tensor([ids], device=following.device)


class Agreement:
    """Replaces candidates, so that the target agrees with each by chance.

    Attributes:
        truth: [1, length] what the target says, the prompt in front.
    """

    def __init__(self, model: Any, probability: float) -> None:
        self.truth = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
        self.num_rounds = self.num_candidates = 0
        self._vocab_size = model.config.vocab_size
        random = torch.Generator().manual_seed(0)
        agrees = torch.rand(1 << 16, generator=random) < probability
        self._agrees = agrees.to(model.device)
        make = model._get_candidate_generator

        def make_agreeing(**kwargs: Any) -> Any:
            generator = make(**kwargs)
            draft = generator.get_candidates
            generator.get_candidates = lambda ids, **kw: self._replace(ids, *draft(ids, **kw))
            return generator

        model._get_candidate_generator = make_agreeing

    def _replace(self, ids: Tensor, drafted: Tensor, scores: Any) -> tuple[Tensor, Any]:
        width, end = ids.shape[1], drafted.shape[1]
        self.num_rounds += 1
        if end == width:
            return drafted, scores
        right = self.truth[:, width:end].to(ids.device)
        at = self.num_candidates % (len(self._agrees) - 256)
        agrees = self._agrees[at : at + end - width].to(ids.device)
        self.num_candidates += end - width
        candidates = torch.where(agrees, right, (right + 1) % self._vocab_size)
        return torch.cat([ids, candidates], dim=1), scores


class Bench:
    """One target and one draft model."""

    def __init__(self, args: argparse.Namespace) -> None:
        device = default_device()
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.args = args
        self.model = shapes.build(
            args.target, device=device, dtype=dtype, fields={"tie_word_embeddings": False}
        )
        vocab_size = self.model.config.vocab_size
        self.draft = shapes.build(
            args.draft, device=device, dtype=dtype, fields={"vocab_size": vocab_size}
        )
        self.following = decisive(self.model)
        self.agreement = Agreement(self.model, args.agreement)
        self.num_tokens = 0  # of the calls whose rounds are counted
        settings = self.draft.generation_config
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0

    def measure(self, model: Any, **options: Any) -> dict[str, float]:
        """Return ms per token of calls with these options; their tokens are checked first."""
        args, device = self.args, self.model.device
        vocab_size = self.model.config.vocab_size
        firsts = itertools.count(7, 1009)

        def call(new: int) -> float:
            truth = continued(self.following, next(firsts) % vocab_size, args.prompt + new + 256)
            agreement = self.agreement
            agreement.truth = truth
            before = agreement.num_rounds, agreement.num_candidates
            ids = truth[:, : args.prompt]
            synchronize(device)
            milliseconds, out = timed(lambda: generate(model, ids, new, **GREEDY, **options))
            if new == 1:  # nothing is verified in such calls
                agreement.num_rounds, agreement.num_candidates = before
            else:
                self.num_tokens += new
            if model is self.model and not torch.equal(out, truth[:, : out.shape[1]]):
                raise RuntimeError(f"the tokens are not those of the target with {options}")
            return milliseconds

        call(args.new + 1)
        self.agreement.num_rounds = self.agreement.num_candidates = self.num_tokens = 0
        return differenced(call, args.new, args.repeats)

    def speculate(self, what: str, **options: Any) -> dict[str, Any]:
        """Return a row with what each verification yields besides."""
        row: dict[str, Any] = {"what": what} | self.measure(self.model, **options)
        agreement = self.agreement
        row["tokens_per_round"] = self.num_tokens / max(agreement.num_rounds, 1)
        row["candidates_per_round"] = agreement.num_candidates / max(agreement.num_rounds, 1)
        return row


def timed(run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Return the seconds of a call, its device included, and its result."""
    start = time.perf_counter()
    out = run()
    synchronize(out.device)
    return time.perf_counter() - start, out


def measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure plain steps of both models, drafts of several lengths and prompt lookups."""
    bench = Bench(args)
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        row["tokens_per_second"] = 1e3 / row["ms"]
        row["times_plain"] = rows[0]["ms"] / row["ms"] if rows else 1.0
        rows.append(row)
        shown = ("ms", "tokens_per_second", "times_plain", "tokens_per_round")
        figures = ", ".join(f"{name} {row[name]:.3f}" for name in shown if name in row)
        print(f"{row['what']}: {figures}", flush=True)

    for model in (bench.model, bench.draft):
        torch_paged.accelerate(model, on_unsupported="raise")
    add({"what": f"{args.target} plain"} | bench.measure(bench.model))
    add({"what": f"{args.draft} plain, the draft model"} | bench.measure(bench.draft))
    for count in args.candidates:
        bench.draft.generation_config.num_assistant_tokens = count
        what = f"{args.target} with {count} candidates of {args.draft}"
        add(bench.speculate(what, assistant_model=bench.draft))
    for count in args.candidates:
        what = f"{args.target} with up to {count} candidates looked up in the prompt"
        add(bench.speculate(what, prompt_lookup_num_tokens=count))
    for model in (bench.model, bench.draft):
        print(torch_paged.explain(model).last_call)
        torch_paged.restore(model)
    return rows


def main() -> None:
    """Measure and print; JSON to --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*shapes.NAMES, shapes.TINY]
    parser.add_argument("--target", default="8b", choices=names)
    parser.add_argument("--draft", default="0.6b", choices=names)
    parser.add_argument("--agreement", type=float, default=0.7)
    parser.add_argument("--candidates", nargs="+", type=int, default=[2, 3, 4, 5, 7])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    rows = measure_all(args)
    if args.json:
        record: dict[str, Any] = {"torch": torch.__version__, "agreement": args.agreement}
        if torch.cuda.is_available():
            record["gpu"] = torch.cuda.get_device_name()
        record |= {"rows": rows, "command": "python -m benchmarks.speculation"}
        os.makedirs(os.path.dirname(args.json) or ".", exist_ok=True)
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
