"""Tests of this folder need a CUDA device; without one none of them is collected."""

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(autouse=True)
def _fresh_device():
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()
