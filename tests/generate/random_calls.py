"""Calls of every kind on accelerated models, in random order, and what they leave behind."""

from __future__ import annotations

import copy
import gc
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, PreTrainedModel

import torch_paged

sys.path.append(str(Path(__file__).resolve().parents[1]))

from models import CACHE_NAME, cache_of, left_pad, prompt, tiny  # noqa: E402

# Rows are compared up to the first step whose two best scores are nearer than this.
NEAR_TIE = 1e-3
LENGTHS = (3, 8, 15, 16, 17, 40)


class Unknown(LlamaForCausalLM):
    """In no table of families, like any subclass, hence in the patched tier."""


class Halving(LogitsProcessor):
    """Unknown to us, and dependent on the ids."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.where(input_ids[:, -1:] % 2 == 0, scores * 0.5, scores)


class Recorder:
    """A streamer that keeps its tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        pass


_DRAWN = {"do_sample": True, "temperature": 0.8}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {**_DRAWN, "top_k": 20, "top_p": 0.9},
    "sampled freely": {**_DRAWN, "top_k": 0},
    "several": {**_DRAWN, "num_return_sequences": 3},
    "penalised": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "odd processor": {"logits_processor": [Halving()]},
    "beams": {"num_beams": 3},
    "sampled beams": {**_DRAWN, "num_beams": 2},
    "streamed": {},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "cache": {"return_dict_in_generate": True},
    "engine": {},
}


class Call(NamedTuple):
    """A kind of call, its prompts and how much it asks for."""

    kind: str
    lengths: tuple[int, ...]
    num_tokens: int


# Needs more blocks than any other, and more tokens than any bucket of prompts has.
LARGEST = Call("greedy", (300,) * 8, 12)
LAST = Call("greedy", (3,), 5)


class Subject:
    """A model and an untouched copy of it."""

    def __init__(self, tier: str, device: torch.device | str) -> None:
        self.tier = tier
        self.model: PreTrainedModel = tiny(LlamaConfig, 8, device, num_hidden_layers=2)
        self.reference = copy.deepcopy(self.model)
        if tier == "patched":
            self.model.__class__ = Unknown

    def accelerate(self) -> None:
        torch_paged.accelerate(self.model, on_unsupported="raise", max_num_seqs=16)


def draw_calls(count: int, seed: int) -> list[Call]:
    """Draw calls, each kind equally often."""
    draw = random.Random(seed)
    calls = []
    for index in range(count):
        kind = list(KINDS)[index % len(KINDS)]
        rows = 1 if kind == "streamed" else draw.choice((1, 2, 4))
        lengths = tuple(draw.choice(LENGTHS) for _ in range(rows))
        calls.append(Call(kind, lengths, draw.choice((1, 5, 12))))
    return calls


def make_call(model: PreTrainedModel, call: Call, seed: int, **extra: Any) -> Any:
    """Generate, with ids and draws from `seed`; `extra` says what to return besides."""
    device = model.device
    rows = [prompt(n, 100 * seed + i, device=device) for i, n in enumerate(call.lengths)]
    ids, mask = left_pad(rows)
    kwargs = {"do_sample": False, **KINDS[call.kind], **extra}
    kwargs |= {"attention_mask": mask, "max_new_tokens": call.num_tokens}
    recorder = Recorder()
    if call.kind == "streamed":
        kwargs["streamer"] = recorder
    torch.manual_seed(seed)
    out = model.generate(ids, **kwargs)
    if call.kind == "streamed":
        sequences = out if isinstance(out, Tensor) else out.sequences
        assert recorder.tokens == sequences[0].tolist()
    if call.kind == "cache":
        more = torch.cat([mask, mask.new_ones(len(mask), call.num_tokens)], 1)
        kwargs |= {CACHE_NAME: cache_of(out), "attention_mask": more, "max_new_tokens": 4}
        out = model.generate(out.sequences, **kwargs)
    return out


def serve(subject: Subject, call: Call, seed: int, check: bool) -> None:
    """Run the prompts of a call as requests of an engine."""
    device = subject.model.device
    with torch_paged.Engine(subject.model) as engine:
        names = []
        for i, n in enumerate(call.lengths):
            ids = prompt(n, 100 * seed + i, device=device)[0].tolist()
            names.append(engine.add_request(ids, max_new_tokens=call.num_tokens, do_sample=False))
            engine.step()
        outputs = engine.run()
        engine.check_integrity()
    for i, n in enumerate(call.lengths if check else ()):
        alone = prompt(n, 100 * seed + i, device=device)
        expected = subject.reference.generate(
            alone,
            attention_mask=torch.ones_like(alone),
            max_new_tokens=call.num_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        if names[i] in outputs:  # others ended in a step above
            got = torch.tensor([list(outputs[names[i]].token_ids)], device=device)
            assert_same_tokens(torch.cat([alone, got], 1), expected)


def run_call(subject: Subject, call: Call, seed: int, check: bool) -> None:
    """Make one call, and compare it with Hugging Face's if `check`."""
    if call.kind == "engine":
        serve(subject, call, seed, check)
    else:
        got = make_call(subject.model, call, seed)
        report = torch_paged.explain(subject.model)
        assert report.last_call is not None and report.last_call.path == subject.tier, str(report)
        if check:
            wanted = {"return_dict_in_generate": True, "output_scores": True}
            expected = make_call(subject.reference, call, seed, **wanted)
            sequences = got if isinstance(got, Tensor) else got.sequences
            if "do_sample" in KINDS[call.kind] or "num_beams" in KINDS[call.kind]:
                assert torch.equal(sequences, expected.sequences), call
            else:
                assert_same_tokens(sequences, expected)
            if call.kind == "scores":
                torch.testing.assert_close(got.scores[0], expected.scores[0], rtol=0, atol=1e-3)
    stats = torch_paged.stats(subject.model)
    # A closed engine may keep prefixes, whose blocks count as free.
    assert stats.kv_blocks_used == 0 and not stats.fallbacks, str(stats)


def assert_same_tokens(got: Tensor, expected: Any) -> None:
    best = torch.stack(expected.scores).float().topk(2, -1).values
    near = best[..., 0] - best[..., 1] < NEAR_TIE
    start = expected.sequences.shape[1] - len(expected.scores)
    for row, ties in enumerate(near.T):
        end = start + (int(ties.nonzero()[0]) if ties.any() else len(ties))
        assert torch.equal(got[row, :end], expected.sequences[row, :end]), f"row {row}"


Levels = dict[str, int]


def levels(subjects: Sequence[Subject]) -> Levels:
    """Return what the models hold now; call it after a collection of garbage."""
    stats = [torch_paged.stats(subject.model) for subject in subjects]
    found = {
        "tensors": sum(issubclass(type(item), Tensor) for item in gc.get_objects()),
        "blocks": sum(item.kv_blocks_total for item in stats),
        "KV bytes": sum(item.kv_bytes for item in stats),
        "graphs": sum(item.graphs for item in stats),
        "graph bytes": sum(item.graph_bytes for item in stats),
    }
    if torch.cuda.is_available():
        found["allocated bytes"] = torch.cuda.memory_allocated()
    return found


def play_round(
    subjects: Sequence[Subject], calls: Sequence[Call], number: int, check_every: int
) -> list[Levels]:
    """Make the calls on both models in the order of this round; return the levels in between.

    Every round has the same calls with other ids, so none needs more than another.
    """
    draw = random.Random(number)
    work = [(subject, call) for call in calls for subject in subjects]
    draw.shuffle(work)
    # The largest first: how far the pool grows past a need depends on what came before.
    # The same call last, as what it leaves is held until the next.
    first, last = ([(subject, call) for subject in subjects] for call in (LARGEST, LAST))
    work = first + work + last
    found = []
    for index, (subject, call) in enumerate(work):
        check = index % check_every == number % check_every
        run_call(subject, call, 1000 * number + index, check)
        if index % 10 == 9 or index + 1 == len(work):
            gc.collect()
            found.append(levels(subjects))
    return found


def end_round(subjects: Sequence[Subject], number: int) -> None:
    """Keep everything, release it or restore the models, in turn."""
    for subject in subjects:
        if number % 3 == 1:
            torch_paged.release(subject.model)
        elif number % 3 == 2:
            torch_paged.restore(subject.model)
            subject.accelerate()


# An engine that finds prefixes keeps a checksum of the weights; whether one does is chance.
TENSORS_BY_CHANCE = 1


def highest(rounds: Sequence[Sequence[Levels]]) -> Levels:
    """Return the maximum of each level over some rounds.

    Of tensors at the ends of rounds only: in between, what a call needs comes in any order.
    """
    every = [item for found in rounds for item in found]
    ends = max(found[-1]["tensors"] for found in rounds)
    return {name: max(item[name] for item in every) for name in every[0]} | {"tensors": ends}
