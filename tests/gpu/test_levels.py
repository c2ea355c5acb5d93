"""500 random calls in one process: memory and graphs level off, and release gives all back."""

from __future__ import annotations

import gc

import torch

import torch_paged
from tests.generate.random_calls import (
    TENSORS_BY_CHANCE,
    Subject,
    draw_calls,
    end_round,
    highest,
    levels,
    play_round,
)

ROUNDS = 6
# One call in so many is compared with Hugging Face's.
CHECK_EVERY = 8


def used_bytes() -> int:
    """Return what is taken of the device, by any process; torch's own cache is emptied first."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_500_calls_level_off_and_release_gives_all_back() -> None:
    subjects = [Subject(tier, "cuda") for tier in ("fused", "patched")]
    calls = draw_calls(40, seed=3)
    # A whole round and a restore: the context, the modules of all kernels, the workspaces and the
    # capture streams, which stay for the life of the process.
    for subject in subjects:
        subject.accelerate()
    play_round(subjects, calls, 0, CHECK_EVERY)
    for subject in subjects:
        torch_paged.restore(subject.model)
    start = used_bytes()

    for subject in subjects:
        subject.accelerate()
    rounds, used, captured = [], [], 0
    for number in range(ROUNDS):
        rounds.append(play_round(subjects, calls, number, CHECK_EVERY))
        used.append(used_bytes())
        captured += rounds[-1][-1]["graphs"]
        if number + 1 < ROUNDS:
            end_round(subjects, number)
    assert ROUNDS * len(subjects) * (len(calls) + 2) >= 500 and captured > 0
    half = ROUNDS // 2
    first, second = highest(rounds[:half]), highest(rounds[half:])
    first["tensors"] += TENSORS_BY_CHANCE * len(subjects)
    first["allocated bytes"] += 64 << 10  # less than one row of logits a call
    first["graph bytes"] += start // 100  # partly a difference of the device's free memory
    for name in first:
        assert second[name] <= first[name], f"{name}: {first} then {second}"
    assert max(used[half:]) - max(used[:half]) <= start // 100, used

    for subject in subjects:
        torch_paged.release(subject.model)
    assert abs(used_bytes() - start) <= start // 100, (start, used_bytes())
    left = levels(subjects)
    assert left["KV bytes"] == left["graphs"] == left["graph bytes"] == left["blocks"] == 0
    for subject in subjects:
        torch_paged.restore(subject.model)
    assert abs(used_bytes() - start) <= start // 100, (start, used_bytes())
