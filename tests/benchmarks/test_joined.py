"""What the benchmark of joined_linear times, and that it checks it first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks import ops_joined, ops_linear_cases
from benchmarks.ops_linear_cases import MODELS
from benchmarks.parity import WrongResult
from benchmarks.timing import Timing, summarize
from torch_paged.ops.fused_linear import fused_linear_reference
from torch_paged.ops.fused_linear.joined import joined_linear_reference
from torch_paged.ops.rms_norm import rms_norm_add_reference


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_linear_cases, "device_key", lambda device: (90, 132))


def test_a_line_is_printed_for_each_layer_and_for_their_chain(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run once and by the references: interpreted kernels take their time."""

    def joined(*args: object, config: object, **options: object) -> tuple[torch.Tensor, ...]:
        return joined_linear_reference(*args, **options)

    def once(run: Callable[[], None], repeats: int, device: torch.device) -> Timing:
        run()
        return summarize([1.0])

    monkeypatch.setattr(ops_joined, "graph_ms", once)
    monkeypatch.setattr(ops_joined, "_launch_joined_linear", joined)
    monkeypatch.setattr(ops_joined, "_launch_fused_linear", fused_linear_reference)
    monkeypatch.setattr(ops_joined, "_launch_rms_norm_add", rms_norm_add_reference)
    ops_joined.main(["--models", "tiny", "--tokens", "1"])
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[1] for line in lines if line.startswith("tiny")]
    assert names == ["qkv", "gate_up", "head", "chain"]


def test_a_wrong_sum_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ops_joined._launch_joined_linear

    def wrong(*args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, total = own(*args, **options)
        return out, total + 1

    monkeypatch.setattr(ops_joined, "_launch_joined_linear", wrong)
    layer = MODELS["tiny"].layers[0]
    with pytest.raises(WrongResult, match="qkv"):
        ops_joined.check(layer, 1, ops_joined.launch_of(layer, 1))


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_the_sweep_tries_the_launch_that_is_chosen(index: int, num_tokens: int) -> None:
    layer = MODELS["gemma-3-4b"].layers[index]
    found = ops_joined.candidates(layer, num_tokens)
    chosen = ops_joined.launch_of(layer, num_tokens)
    assert chosen is None or found[0] == chosen
    assert len(set(found)) == len(found) and 20 <= len(found) <= 80
