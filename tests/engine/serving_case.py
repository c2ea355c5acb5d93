"""Tiny models, pools of a few blocks and Hugging Face's answers for the tests of the engine."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

import torch_paged
from torch_paged.engine.output import RequestOutput
from torch_paged.generate.registry import find_session

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models import byte_tokenizer, prompt, smallest_gap, tape_model, tiny  # noqa: E402, F401

# Both sides compute in float32 and differ by a few 1e-6.
NEAR_TIE = 1e-4


@functools.cache
def reference_model(seed: int, **fields: Any) -> nn.Module:
    """Return a model that is never accelerated."""
    return tiny(LlamaConfig, seed, **fields)


@functools.cache
def small_model() -> nn.Module:
    """Return the smallest model with more than one head and layer; never accelerated."""
    return reference_model(
        5,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
    )


def ids_of(length: int, seed: int, vocab: int = 64) -> list[int]:
    """Return the prompt of this length and seed as a list."""
    return prompt(length, seed, vocab)[0].tolist()


class Answers:
    """What `generate()` of a model says to single prompts, each asked once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[Any, tuple[list[int], float]] = {}

    def __call__(self, ids: Sequence[int], num_tokens: int, **kwargs: Any) -> list[int]:
        """Return the new tokens of a greedy run; fail on a near tie."""
        tokens, gap = self._ask(ids, num_tokens, kwargs)
        assert gap > NEAR_TIE, f"a near tie of {gap:.4f} decides this case: take another seed"
        return tokens

    def is_clear(self, ids: Sequence[int], num_tokens: int, **kwargs: Any) -> bool:
        """Say whether no near tie decides the answer."""
        return self._ask(ids, num_tokens, kwargs)[1] > NEAR_TIE

    def _ask(
        self, ids: Sequence[int], num_tokens: int, kwargs: dict[str, Any]
    ) -> tuple[list[int], float]:
        key = (tuple(ids), num_tokens, repr(sorted(kwargs.items())))
        if key not in self._known:
            tensor = torch.tensor([list(ids)])
            out = self._model.generate(
                tensor,
                attention_mask=torch.ones_like(tensor),
                max_new_tokens=num_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
                **kwargs,
            )
            new = out.sequences[0, len(ids) :].tolist()
            finite = [s.masked_fill(s.isinf(), -1e4) for s in out.scores]
            self._known[key] = (new, smallest_gap(finite))
        return self._known[key]


def make_engine(
    model: nn.Module, *, num_blocks: int | None = None, **config: Any
) -> torch_paged.Engine:
    """Make an engine on a copy of the model, whose pool has at most `num_blocks` blocks."""
    engine = torch_paged.Engine(copy.deepcopy(model), **{"on_unsupported": "raise", **config})
    if num_blocks is not None:
        core = core_of(engine)
        core.prepare(1, 1, 1)
        core.pool.max_bytes = num_blocks * core.pool.block_bytes
    return engine


def core_of(engine: torch_paged.Engine) -> Any:
    """Return the core under an engine."""
    session = find_session(engine._target)
    assert session is not None and session.core is not None
    return session.core


def run_checked(engine: torch_paged.Engine) -> dict[Any, RequestOutput]:
    """Step until idle, checking the books after each step; return the last outputs."""
    last: dict[Any, RequestOutput] = {}
    tokens: dict[Any, list[int]] = {}
    while not engine.is_idle:
        for out in engine.step():
            assert out.request_id not in last, "a request must end once, and be silent afterwards"
            before = list(out.token_ids)[: len(out.token_ids) - len(out.new_token_ids)]
            seen = tokens.setdefault(out.request_id, before)
            seen += out.new_token_ids
            assert out.token_ids == seen, "new tokens must continue those reported before"
            if out.finished:
                last[out.request_id] = out
        engine.check_integrity()
    return last


def assert_all_free(engine: torch_paged.Engine) -> None:
    """Check that no block and no slot is held."""
    core = core_of(engine)
    if core.is_prepared:
        assert core.allocator.num_live == 0
        assert core.slots.num_free == core.slots.num_slots
