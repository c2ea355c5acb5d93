"""Random turns on leased caches, in several threads as well, beside copied ones."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    CACHE_NAME,
    cache_of,
    left_pad,
    prompt,
    tiny,
)
from transformers import LlamaConfig

import torch_paged

sys.path.append(str(Path(__file__).parent))

from lease_case import (  # noqa: E402
    assert_equal,
    assert_nothing_held,
    core_of,
    immediate,
    small_pool,
    turn,
)


class Talks:
    """Random turns on caches that are shared, cropped, looked at and dropped."""

    def __init__(self, model: Any, seed: int, num_blocks: int | None) -> None:
        self._model = model
        self._num_blocks = num_blocks
        self._device = model.device
        self._draw = random.Random(seed)
        # Sequences, mask and cache of each talk.
        self._talks: list[tuple[torch.Tensor, torch.Tensor, Any]] = []

    def play(self, steps: int) -> tuple[list[torch.Tensor], list[Any]]:
        """Return all sequences, and the caches that are left."""
        said = []
        self._limit()
        for step in range(steps):
            act = self._draw.choice(("begin", "go on", "go on", "copy", "crop", "look", "drop"))
            if not self._talks or (act == "begin" and len(self._talks) < 4):
                lengths = [self._draw.randint(3, 20) for _ in range(self._draw.choice((1, 2)))]
                rows = [
                    prompt(n, 7 * step + i, device=self._device) for i, n in enumerate(lengths)
                ]
                said.append(self._turn(*left_pad(rows), {}))
                continue
            at = self._draw.randrange(len(self._talks))
            sequences, mask, cache = self._talks[at]
            if act == "drop" or sequences.shape[1] > 60:
                del self._talks[at]
            elif act == "copy" and len(self._talks) < 4:
                self._talks.append((sequences, mask, copy.deepcopy(cache)))
            elif act == "crop":
                count = self._draw.randint(1, 3)
                cache.crop(-count)
                self._talks[at] = (sequences[:, :-count], mask[:, :-count], cache)
            elif act == "look":
                assert cache.layers[1].values is not None
            elif act == "go on":
                del self._talks[at]
                ids = prompt(self._draw.randint(1, 9), step, device=self._device)
                ids = ids.expand(len(sequences), -1)
                mask = torch.cat([mask, torch.ones_like(ids)], 1)
                ids = torch.cat([sequences, ids], 1)
                said.append(self._turn(ids, mask, {CACHE_NAME: cache}))
            if step % 29 == 28:
                torch_paged.release(self._model)
                self._limit()
            core_of(self._model).leases.check_integrity()
        return said, [cache for _, _, cache in self._talks]

    def _limit(self) -> None:
        if self._num_blocks is not None:
            small_pool(self._model, self._num_blocks)

    def _turn(self, ids: torch.Tensor, mask: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
        count = self._draw.choice((1, 4, 9))
        out = turn(self._model, ids, count, attention_mask=mask, **cache)
        mask = torch.cat([mask, mask.new_ones(len(mask), count)], 1)
        self._talks.append((out.sequences, mask, cache_of(out)))
        return out.sequences


@pytest.mark.parametrize("num_blocks", [None, 14])
@pytest.mark.parametrize("seed", range(3))
def test_random_talks(seed, num_blocks, device, accelerate, monkeypatch) -> None:
    results = []
    for form in (immediate(monkeypatch), contextlib.nullcontext()):
        model = tiny(LlamaConfig, 5, device)
        accelerate(model)
        with form:
            results.append(Talks(model, seed, num_blocks).play(70))
    assert len(results[0][0]) > 15
    for expected, got in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(got, expected)
    for expected, got in zip(results[0][1], results[1][1], strict=True):
        assert_equal(got, expected)
    del got
    results.clear()
    gc.collect()
    assert_nothing_held(model)


def test_threads_look_at_caches_and_drop_them(device, accelerate, monkeypatch) -> None:
    model = accelerate(tiny(LlamaConfig, 5, device))
    prompts = [prompt(12 + seed, seed, device=device) for seed in range(4)]
    with immediate(monkeypatch):
        expected = [cache_of(turn(model, ids, 6)) for ids in prompts]
    torch_paged.release(model)
    small_pool(model, 6)
    line: list[tuple[int, Any]] = []
    errors: list[BaseException] = []
    over = threading.Event()

    def work(thread: int) -> None:
        seen = 0
        try:
            while not (over.is_set() and not line):
                if not line:
                    time.sleep(0)
                    continue
                try:
                    number, cache = line.pop()
                except IndexError:
                    continue
                seen += 1
                if (seen + thread) % 3 == 0:
                    del cache  # in this thread, whatever the other one does
                elif (seen + thread) % 3 == 1:
                    copied = copy.deepcopy(cache)
                    del cache
                    assert_equal(copied, expected[number])
                else:
                    assert_equal(cache, expected[number])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        for call in range(40):
            number = call % 4
            line.append((number, cache_of(turn(model, prompts[number], 6))))
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)
    gc.collect()
    assert_nothing_held(model)
