"""The batch evaluation example: every line once, whatever happens in between."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torch_paged

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "batch_eval.py"
sys.path += [str(ROOT / "tests"), str(SCRIPT.parent)]

from models import byte_tokenizer  # noqa: E402


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("batch_eval", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny model with its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def model(folder: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(folder).eval()


def write_inputs(path: Path, count: int) -> None:
    with path.open("w") as file:
        for i in range(count):
            line: dict[str, Any] = {"id": f"line {i}", "prompt": "abcdefgh"[: i % 8 + 1] * 3}
            if i % 3 == 0:
                line["max_new_tokens"] = i % 5 + 1
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_completions_are_those_of_generate(script: ModuleType, model: Any, tmp_path: Path) -> None:
    inputs, outputs = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_inputs(inputs, 12)
    reference, tokenizer = copy.deepcopy(model), byte_tokenizer()
    count = script.evaluate(model, tokenizer, inputs, outputs, max_num_seqs=4, max_new_tokens=8)
    assert count == 12
    records = {record["id"]: record for record in read(outputs)}
    assert len(records) == 12
    for line in script.read_inputs(inputs):
        record = records[line["id"]]
        ids = tokenizer(line["prompt"], return_tensors="pt").input_ids
        new = line.get("max_new_tokens", 8)
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        expected = out.sequences[0, ids.shape[1] :]
        assert record["token_ids"] == expected.tolist()
        assert record["text"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert record["finish_reason"] == "length" and "error" not in record
        logprobs = torch.stack(out.logits)[:, 0].log_softmax(-1)
        logprobs = logprobs.gather(1, expected[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(record["logprobs"]), logprobs, atol=1e-4, rtol=0)
    assert not torch_paged.is_accelerated(model)


def test_a_run_broken_off_anywhere_is_continued(
    script: ModuleType, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, outputs = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    whole = tmp_path / "whole.jsonl"
    write_inputs(inputs, 20)
    tokenizer = byte_tokenizer()
    script.evaluate(model, tokenizer, inputs, whole, max_num_seqs=4, max_new_tokens=8)
    write = script.BatchEval._write_line
    for stop_after in (1, 4, 9):
        written = [0]

        def failing(self: Any, record: dict[str, Any], written: list[int] = written) -> None:
            if written[0] == stop_after:  # noqa: B023 - used within this turn of the loop
                # As much of the line as a kill in the middle of the write leaves.
                self._file.write(json.dumps(record).encode()[:25])
                self._file.flush()
                raise KeyboardInterrupt
            written[0] += 1
            write(self, record)

        monkeypatch.setattr(script.BatchEval, "_write_line", failing)
        with pytest.raises(KeyboardInterrupt):
            script.evaluate(model, tokenizer, inputs, outputs, max_num_seqs=4, max_new_tokens=8)
        assert not outputs.read_bytes().endswith(b"\n")
    monkeypatch.setattr(script.BatchEval, "_write_line", write)
    assert script.evaluate(
        model, tokenizer, inputs, outputs, max_num_seqs=4, max_new_tokens=8
    ) == 20 - (1 + 4 + 9)
    assert script.evaluate(model, tokenizer, inputs, outputs, max_new_tokens=8) == 0
    by_id = {record["id"]: record for record in read(outputs)}
    assert len(read(outputs)) == len(by_id) == 20
    for record in read(whole):
        assert by_id[record["id"]]["token_ids"] == record["token_ids"]


def test_a_killed_process_is_continued(folder: Path, tmp_path: Path) -> None:
    inputs, outputs = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_inputs(inputs, 60)
    command = [sys.executable, str(SCRIPT), str(inputs), str(outputs), "--model", str(folder)]
    command += ["--max-new-tokens", "40", "--max-num-seqs", "4", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None and not (outputs.exists() and len(read_raw(outputs)) >= 5):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.wait(60)
    before = len(read_raw(outputs))
    assert before >= 5
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert len(read(outputs)) == 60 == len({record["id"] for record in read(outputs)})
    assert {record["finish_reason"] for record in read(outputs)} == {"length"}


def read_raw(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def test_lines_that_cannot_run_say_so(script: ModuleType, model: Any, tmp_path: Path) -> None:
    inputs, outputs = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"prompt": "abc", "max_new_tokens": 2},
        {"prompt": "abc", "num_beams": 3},
        {"prompt": "a" * 200},
        {"prompt_ids": [5, 6], "temperature": 0.7, "seed": 1, "max_new_tokens": 2},
        {"prompt": "", "max_new_tokens": 2},
    ]
    inputs.write_text("\n".join(json.dumps(line) for line in lines))
    script.evaluate(model, byte_tokenizer(), inputs, outputs, max_new_tokens=4)
    records = {record["id"]: record for record in read(outputs)}
    assert [records[i]["finish_reason"] for i in range(5)] == [
        "length",
        "error",
        "error",
        "length",
        "error",
    ]
    assert "num_beams=3" in records[1]["error"] and "max_model_len" in records[2]["error"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "line 1 is no JSON"),
        ('{"text": "a"}', "must be an object with prompt"),
        ('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}', "id 1 occurs twice"),
    ],
)
def test_inputs_are_checked_before_anything_runs(
    script: ModuleType, tmp_path: Path, text: str, match: str
) -> None:
    inputs = tmp_path / "in.jsonl"
    inputs.write_text(text)
    with pytest.raises(ValueError, match=match):
        script.evaluate(None, None, inputs, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
