"""Fixtures of the generate() tests: the device, and acceleration that may not fall back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_paged

# For `models`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """Keep TF32 out of both runs."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def accelerate() -> Iterator[Callable[..., nn.Module]]:
    """torch_paged.accelerate, where a fallback raises unless asked for; undone after the test."""
    accelerated: list[nn.Module] = []

    def accelerate_strictly(model: nn.Module, **overrides: Any) -> nn.Module:
        torch_paged.accelerate(model, **{"on_unsupported": "raise", **overrides})
        accelerated.append(model)
        return model

    yield accelerate_strictly
    for model in accelerated:
        if torch_paged.is_accelerated(model):
            torch_paged.restore(model)
