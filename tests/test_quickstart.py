"""The demonstration, run as a user runs it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torch_paged

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "quickstart.py"
sys.path.append(str(SCRIPT.parent))
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(chr(code) for code in range(32, 127))]


def run_quickstart(*options: str) -> str:
    """Run the script without a terminal, wide enough that no cell wraps; return its output."""
    # Found from the checkout, installed or not.
    environment = os.environ | {
        "COLUMNS": "240",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    return result.stdout


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name.
    sys.modules["quickstart"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random two-layer llama with a tokenizer of single characters and no chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "."},
            "behavior": "Isolated",
            "invert": False,
        },
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(WORDS)},
            "unk_token": "<unk>",
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_any_folder_and_odd_batch_work(tiny_model: Path) -> None:
    output = run_quickstart(
        *("--model", str(tiny_model), "--dtype", "float32"),
        *("--max-new-tokens", "5", "--batch", "9", "--turns", "4"),
    )
    assert output.startswith(tiny_model.name)
    assert output.count("How fast: medians of 4 turns") == 2
    assert len(re.findall(r"\d+ equal", output)) == 10


@pytest.mark.parametrize(
    "option", ["--max-new-tokens=1", "--batch=0", "--turns=0", "--dtype=int8"]
)
def test_wrong_option_prints_the_usage(
    script: ModuleType,
    option: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--model=none", option])
    with pytest.raises(SystemExit) as raised:
        script.main()
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert "usage:" in error and option.split("=")[0] in error


def test_shuffled_prompts_keep_lengths_padding_and_tokens(script: ModuleType) -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    fresh = script.shuffled({"input_ids": ids, "attention_mask": mask}, seed=1)
    assert torch.equal(fresh["attention_mask"], mask)
    assert torch.equal(fresh["input_ids"][mask == 0], ids[mask == 0])
    assert torch.equal(fresh["input_ids"].sort()[0], ids.sort()[0])
    assert not torch.equal(fresh["input_ids"], ids)
    again = script.shuffled({"input_ids": ids, "attention_mask": mask}, seed=2)
    assert not torch.equal(again["input_ids"], fresh["input_ids"])


class _Words:
    """Stands for a tokenizer: token i is written as "w<i>"."""

    def decode(self, tokens: list[int]) -> str:
        return " ".join(f"w{token}" for token in tokens)


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ([1, 2, 3], [1, 2, 3], "3 equal"),
        ([1, 2, 3], [1, 4, 3], "part at token 2: 'w2' / 'w4'"),
        ([1, 2], [1, 2, 3], "part at token 3: '' / 'w3'"),
    ],
    ids=["equal", "different", "shorter"],
)
def test_comparison_says_where_rows_part(
    script: ModuleType, old: list[int], new: list[int], verdict: str
) -> None:
    assert script.compare(old, new, _Words()) == verdict


class _Recorder:
    """Stands for a model; notes whether each call opted out, and how many tokens it asked for."""

    def __init__(self) -> None:
        self.generation_config = SimpleNamespace(eos_token_id=0, torch_paged=None)
        self.calls: list[tuple[bool, int, list[list[int]]]] = []

    def generate(
        self, input_ids: torch.Tensor, max_new_tokens: int, **kwargs: object
    ) -> torch.Tensor:
        opted_out = self.generation_config.torch_paged is False
        self.calls.append((opted_out, max_new_tokens, input_ids.tolist()))
        new = torch.ones(input_ids.shape[0], max_new_tokens, dtype=torch.long)
        return torch.cat([input_ids, new], 1)


@pytest.mark.parametrize("num_turns", [1, 2, 5, 6])
def test_sides_take_turns_on_the_same_prompts(script: ModuleType, num_turns: int) -> None:
    model, ticks = _Recorder(), []
    ids = torch.arange(3, 43).view(2, 20)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = SimpleNamespace(max_new_tokens=64, turns=num_turns)
    turns = script.take_turns(model, inputs, options, lambda: ticks.append(1))
    assert [len(turns[side]) for side in script.SIDES] == [num_turns] * 2
    assert len(ticks) == 2 * num_turns
    # Each turn of a side is a call for one token and one for 32.
    firsts, longer = model.calls[::2], model.calls[1::2]
    assert all(tokens == 1 for _, tokens, _ in firsts)
    assert all(tokens == 32 for _, tokens, _ in longer)
    opted_out = [out for out, _, _ in firsts]
    assert opted_out == [out for out, _, _ in longer]
    # Each goes first by turns, and torch_paged last of all.
    assert opted_out[::2] == [(num_turns - i) % 2 == 1 for i in range(num_turns)]
    assert opted_out[1::2] == [not out for out in opted_out[::2]] and not opted_out[-1]
    # Both sides see the prompts of a turn, and no prompt comes twice.
    seen = [str(prompts) for calls in (firsts, longer) for _, _, prompts in calls]
    assert seen[::2] == seen[1::2] and len(set(seen)) == 2 * num_turns


def test_speed_up_is_that_of_the_turns(script: ModuleType) -> None:
    turns = {
        "Hugging Face": [script.Turn(30.0, 20.0, 5.0), script.Turn(60.0, 60.0, 2.0)],
        "torch_paged": [script.Turn(10.0, 10.0, 10.0), script.Turn(60.0, 15.0, 6.0)],
    }
    table = script.speed_table(turns)
    cells = [list(column.cells) for column in table.columns]
    assert cells[1] == ["45.00", "40.00", "3.50"] and cells[2] == ["35.00", "12.50", "8.00"]
    assert cells[3] == ["2.00x", "3.00x", "2.50x"]
    assert cells[4] == ["1.00 - 3.00", "2.00 - 4.00", "2.00 - 3.00"]


def test_timed_calls_run_to_their_length(script: ModuleType, tiny_model: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    ids = torch.arange(5, 45).view(2, 20)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    ended, _ = script.call(model, inputs, 2)
    # Every row would end with the first token.
    model.generation_config.eos_token_id = sorted({row[0] for row in ended})
    assert [len(row) for row in script.call(model, inputs, 9)[0]] == [1, 1]
    lengths = []
    call = script.call

    def recording(model: object, prompts: dict[str, torch.Tensor], num_tokens: int) -> object:
        prompts = inputs  # that end at once, unlike what is shuffled
        rows, seconds = call(model, prompts, num_tokens)
        lengths.append((num_tokens, *map(len, rows)))
        return rows, seconds

    with torch_paged.accelerated(model), pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "call", recording)
        options = SimpleNamespace(max_new_tokens=9, turns=1)
        script.take_turns(model, inputs, options, lambda: None)
    assert lengths == [(1, 1, 1), (9, 9, 9)] * 2
