"""What a process holds levels off over calls of every kind, releases and restores."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch_paged

sys.path.append(str(Path(__file__).parent))

from random_calls import (  # noqa: E402
    TENSORS_BY_CHANCE,
    Subject,
    draw_calls,
    end_round,
    highest,
    levels,
    play_round,
)


def test_random_calls_leave_nothing_behind(device) -> None:
    subjects = [Subject(tier, device) for tier in ("fused", "patched")]
    for subject in subjects:
        subject.accelerate()
    calls = draw_calls(12, seed=3)
    rounds = []
    for number in range(4):
        rounds.append(play_round(subjects, calls, number, check_every=6))
        end_round(subjects, number)
    first, second = highest(rounds[:2]), highest(rounds[2:])
    first["tensors"] += TENSORS_BY_CHANCE * len(subjects)
    for name in ("tensors", "blocks", "KV bytes", "graphs"):
        assert second[name] <= first[name], f"{name}: {first} then {second}"
    for subject in subjects:
        torch_paged.release(subject.model)
    gc.collect()
    left = levels(subjects)
    assert left["KV bytes"] == left["graphs"] == left["blocks"] == 0
    for subject in subjects:
        torch_paged.restore(subject.model)
