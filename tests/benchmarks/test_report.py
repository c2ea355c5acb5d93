"""The report command from end to end: what it writes, what it refuses, what survives its end."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import baselines, report, sections
from benchmarks.bench import Bench
from benchmarks.parity import WrongResult
from benchmarks.record import Record, Row
from torch_paged.engine.sampler import GreedySampler

TINY = ["--device", "cpu", "--models", "tiny"]
OURS = ["decode", "sampling", "prefill", "long_context", "startup", "ragged"]


def run(folder: Path, *arguments: str) -> int:
    """Run the command in this process and return its exit status."""
    return report.main([*TINY, "--out", str(folder), *arguments])


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run over all sections that finished."""
    folder = tmp_path_factory.mktemp("report")
    assert run(folder, "--batches", "1", "3") == 0
    return folder


def test_every_section_is_measured(whole: Path) -> None:
    data = read(whole)
    assert data["refused"] == {} and data["failed"] == {}
    expected = {*report.ALL_SECTIONS} - {"vllm"}
    if torch.cuda.is_available():  # ops run where the kernels are
        expected -= {"ops"}
    assert {row["section"] for row in data["rows"]} == expected
    assert data["left_out"]["vllm"] == "vLLM is not installed here"
    assert data["runs"][0]["finished"] and data["runs"][0]["read_tbps"] > 0


def test_rows_have_values_spread_and_rates(whole: Path) -> None:
    for row in read(whole)["rows"]:
        assert row["low"] <= row["value"] <= row["high"], row
        assert all(math.isfinite(row[name]) for name in ("low", "value", "high")), row
        if row["unit"] in ("ms/token", "us"):
            assert row["achieved_unit"] in ("GB/s", "TFLOP/s") and row["of_ceiling"] is not None


def test_rows_that_the_report_promises_are_there(whole: Path) -> None:
    record = Record.load(whole / "report.json")
    cases = {(row.section, row.system, row.case) for row in record.rows}
    assert {
        ("decode", "torch_paged", "batch 3"),
        ("sampling", "torch_paged", "batch 3, engine, drawn by counter"),
        ("prefill", "torch_paged", "40 tokens"),
        ("prefill", "hf sdpa", "40 tokens"),
        ("long_context", "torch_paged", "batch 1 at 200 tokens"),
        ("startup", "torch_paged", "to first token, kernels compiled before"),
        ("ragged", "torch_paged", "8 requests"),
        ("hf_eager", "hf eager", "batch 1"),
    } <= cases
    sampled = [row for row in record.rows if "drawn" in row.case]
    assert sampled and all("over_greedy_ms" in row.extra for row in sampled)
    (ragged,) = [row for row in record.rows if row.case == "8 requests"]
    assert 0 < ragged.extra["kv_use"] <= 1
    (latency,) = [row for row in record.rows if row.case == "2 in flight"]
    assert {"ttft_p99_ms", "itl_p99_ms"} <= latency.extra.keys()


def test_markdown_has_versions_ceilings_and_every_row(whole: Path) -> None:
    text = (whole / "report.md").read_text("utf-8")
    assert f"torch {torch.__version__}" in text and "read ceiling" in text
    for row in read(whole)["rows"]:
        assert row["case"] in text
    assert "They are set for one H200; this was measured elsewhere." in text


def ended_by(end: Callable[[], None]) -> Callable[..., list[Row]]:
    def measurement(*arguments: object) -> list[Row]:
        end()
        raise AssertionError("it went on")

    return measurement


def wrong() -> None:
    raise WrongResult("logits are off")


def lying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let greedy decoding choose the worst token."""
    monkeypatch.setattr(GreedySampler, "__call__", lambda self, logits: logits.argmin(-1))


def test_refusal_stays_until_the_measurement_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--sections", "decode", "prefill", "--batches", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(sections, "_prefill", ended_by(wrong))
        assert run(tmp_path, *arguments) == 1
    refusal = {"key": "prefill/tiny/16 tokens", "why": "logits are off"}
    assert read(tmp_path)["refused"] == {"tiny": refusal}
    # Asking for something else does not make it right.
    assert run(tmp_path, "--sections", "decode", "--batches", "1", "2", "--resume") == 1
    assert read(tmp_path)["left_out"] == {"decode/tiny/batch 2": "tiny had a wrong result"}
    assert "ms/token" not in (tmp_path / "report.md").read_text("utf-8")
    assert run(tmp_path, *arguments, "--resume") == 0
    assert read(tmp_path)["refused"] == {}
    assert "ms/token" in (tmp_path / "report.md").read_text("utf-8")


def test_wrong_token_is_refused_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lying(monkeypatch)
    assert run(tmp_path, "--sections", "decode", "startup", "--batches", "1", "2") == 1
    message = read(tmp_path)["refused"]["tiny"]["why"]
    assert "tiny decode 1: row 0, new token 0: greedy token misses the best logit by" in message
    assert f"WRONG RESULT of tiny, not reported: {message}" in capsys.readouterr().err
    text = (tmp_path / "report.md").read_text("utf-8")
    assert message in text and "ms/token" not in text
    # What was measured before the check, as start-up was, is not reported either.
    assert read(tmp_path)["rows"] and "to first token" not in text
    assert set(read(tmp_path)["left_out"].values()) == {"tiny had a wrong result"}


def test_wrong_result_of_a_baseline_bars_that_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "_hf_static", ended_by(wrong))
    assert run(tmp_path, "--sections", "decode", "hf_static", "--batches", "1") == 0
    data = read(tmp_path)
    assert data["failed"] == {"hf_static/tiny/batch 1": "wrong result: logits are off"}
    assert "ms/token" in (tmp_path / "report.md").read_text("utf-8")


def test_failure_is_named_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> list[Row]:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(sections, "_start_again", fail)
    assert run(tmp_path, "--sections", "startup", "--batches", "1") == 1
    data = read(tmp_path)
    assert data["failed"] == {"startup/tiny/again": "OutOfMemoryError: no room"}
    assert any(row["key"] == "startup/tiny/graphs" for row in data["rows"])


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("end", [terminate, interrupt])
def test_run_that_is_killed_keeps_what_it_measured_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[], None]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    arguments = ["--sections", "decode", "startup", "--batches", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(sections, "_graphs", ended_by(end))
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            run(tmp_path, *arguments)
    assert signal.getsignal(signal.SIGTERM) is before
    first = read(tmp_path)
    keys = {row["key"] for row in first["rows"]}
    assert "decode/tiny/batch 1" in keys and "startup/tiny/graphs" not in keys
    assert "finished" not in first["runs"][0]
    assert "ended before its end" in (tmp_path / "report.md").read_text("utf-8")

    assert run(tmp_path, *arguments, "--resume") == 0
    second = read(tmp_path)
    assert second["rows"][: len(first["rows"])] == first["rows"]
    more = second["rows"][len(first["rows"]) :]
    assert {row["key"] for row in more} >= {"startup/tiny/graphs"}
    assert all(row["run"] == 1 for row in more) and len(second["runs"]) == 2
    assert (
        "ended before its end" not in (tmp_path / "report.md").read_text("utf-8").split("run 2")[1]
    )


def test_file_is_whole_after_every_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    original = sections._decode

    def look(*arguments: Any) -> list[Row]:
        seen.append({row["key"] for row in read(tmp_path)["rows"]})
        return original(*arguments)

    monkeypatch.setattr(sections, "_decode", look)
    assert run(tmp_path, "--sections", "decode", "--batches", "1", "2") == 0
    assert seen[0] == set() and "decode/tiny/batch 1" in seen[1]
    assert not list(tmp_path.glob("*.tmp"))


def test_no_measurement_starts_past_the_limit(tmp_path: Path) -> None:
    assert run(tmp_path, "--sections", "decode", "ragged", "--limit-seconds", "0") == 0
    data = read(tmp_path)
    assert data["rows"] == []
    assert data["left_out"]["ragged/tiny"] == "no time was left of 0 s"
    assert "no time was left of 0 s" in (tmp_path / "report.md").read_text("utf-8")


def test_measurements_are_not_overwritten(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (whole / "report.json").read_bytes()
    assert run(whole, "--sections", "decode") == 2
    assert "exists; pass --resume to go on, or another --out" in capsys.readouterr().err
    assert run(whole, "--sections", "decode", "--dtype", "bfloat16", "--resume") == 2
    assert "dtype 'float32' then, 'bfloat16' now" in capsys.readouterr().err
    assert (whole / "report.json").read_bytes() == before


def test_bfloat16_is_held_to_the_error_of_hugging_face(tmp_path: Path) -> None:
    assert run(tmp_path, "--sections", "decode", "--dtype", "bfloat16", "--batches", "2") == 0
    assert read(tmp_path)["environment"]["dtype"] == "bfloat16"


def test_quick_sections_come_in_the_order_of_their_weight() -> None:
    assert list(report.ALL_SECTIONS)[: len(OURS)] == OURS
    assert list(report.ALL_SECTIONS)[-1] == "hf_static"


class FakeEngine:
    """What the benchmark asks of vLLM's `LLM`."""

    def __init__(self, **arguments: Any) -> None:
        assert arguments["load_format"] == "dummy"
        config = json.loads((Path(arguments["model"]) / "config.json").read_text("utf-8"))
        assert config["architectures"] == ["LlamaForCausalLM"] and config["hidden_size"] == 64

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        assert all(len(prompt["prompt_token_ids"]) == 8 for prompt in prompts)
        tokens = SimpleNamespace(token_ids=[0] * params.max_tokens)
        return [SimpleNamespace(outputs=[tokens]) for _ in prompts]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module in the place of vLLM, which is not installed where tests run."""
    module = SimpleNamespace(LLM=FakeEngine, SamplingParams=SimpleNamespace, __spec__=object())
    monkeypatch.setitem(sys.modules, "vllm", module)
    yield module


def test_vllm_is_measured_where_it_is_importable(tmp_path: Path, vllm: Any) -> None:
    assert run(tmp_path, "--sections", "vllm", "--batches", "1", "2") == 0
    rows = read(tmp_path)["rows"]
    assert [(row["system"], row["case"]) for row in rows] == [
        ("vllm", "batch 1"),
        ("vllm", "batch 2"),
    ]


def test_bench_checks_a_size_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record.create(tmp_path / "report.json", {})
    record.start_run("test")
    bench = Bench(
        record,
        report.SMALL,
        torch.device("cpu"),
        torch.float32,
        ["tiny"],
        [1],
        read_tbps=1.0,
        peak_tflops=1.0,
    )
    model = bench.checked("tiny", "decode", [1, 2])
    lying(monkeypatch)
    assert bench.checked("tiny", "decode", [2]) is model
    with pytest.raises(WrongResult, match="tiny decode 3"):
        bench.checked("tiny", "decode", [3])
