"""Set-up of the tests of engines."""

import pytest

from torch_paged.engine import prompt_graphs


@pytest.fixture(autouse=True)
def _sizes_are_captured_when_met_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short tests see a size launched op by op, captured and replayed."""
    monkeypatch.setattr(prompt_graphs, "_MEETINGS", 2)
