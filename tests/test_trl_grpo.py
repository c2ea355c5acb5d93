"""The TRL example: what it asks for, and that the trainer's rollouts take the fast path."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import torch_paged

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from models import byte_tokenizer, tiny  # noqa: E402

needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install trl"
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", ["/somewhere/trl_grpo.py"])
    return importlib.import_module("trl_grpo")


def tiny_model() -> Any:
    # Its vocabulary is the tokenizer's: the trainer decodes whatever is drawn.
    return tiny(LlamaConfig, 8, vocab_size=len(byte_tokenizer()), initializer_range=0.05)


def prompts() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[0, 0, 3, 4, 5], [6, 7, 8, 9, 10]])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def test_defaults_are_read(script: ModuleType) -> None:
    options = script.parse_arguments([])
    assert options.model is None and not options.plain and not options.gradient_checkpointing
    assert options.dtype == torch.float32
    assert options.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--num-generations", "1"], "--num-generations must be at least 2, got 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--device", "gpu"], "--device must be cpu, cuda or cuda:N, got 'gpu'"),
    ],
)
def test_arguments_out_of_range_are_told(
    arguments: list[str], told: str, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        script.parse_arguments(arguments)
    assert raised.value.code == 2
    assert told in capsys.readouterr().err


def test_another_gpu_than_the_first_is_for_the_environment_to_choose(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "find_device", torch.device)
    with pytest.raises(SystemExit) as raised:
        script.parse_arguments(["--device", "cuda:1"])
    assert raised.value.code == 2
    assert "set CUDA_VISIBLE_DEVICES=1" in capsys.readouterr().err
    assert script.parse_arguments(["--device", "cuda:0"]).device == torch.device("cuda:0")


def test_without_trl_one_line_says_what_to_install(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setattr(sys, "argv", ["/somewhere/trl_grpo.py", "--device", "cpu"])
    with pytest.raises(SystemExit) as raised:
        script.main()
    assert raised.value.code == 2
    error = "trl_grpo.py: error: the module trl is not installed; run 'pip install trl'\n"
    assert capsys.readouterr().err == error


def test_a_replaced_forward_is_set_aside_while_generating(script: ModuleType) -> None:
    model = torch_paged.accelerate(tiny_model()).train()
    own = model.forward
    replaced: Callable[..., Any] = lambda *args, **kwargs: own(*args, **kwargs)  # noqa: E731
    model.forward = replaced
    rollouts = script.Rollouts(model)
    with torch.no_grad():
        output = model.generate(**prompts(), max_new_tokens=6, do_sample=False)
    assert output.shape == (2, 11)
    assert rollouts.paths == {"fused": 1}
    assert vars(model)["forward"] is replaced
    rollouts.close()
    assert "generate" not in vars(model)
    del model.forward
    torch_paged.restore(model)
    expected = model.generate(**prompts(), max_new_tokens=6, do_sample=False)
    assert torch.equal(output, expected)


def test_a_rollout_that_falls_back_is_told(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch_paged.accelerate(tiny_model())
    model.get_input_embeddings().register_forward_hook(lambda *args: None)
    rollouts = script.Rollouts(model)
    with torch.no_grad():
        model.generate(**prompts(), max_new_tokens=4, do_sample=False)
    scores = rollouts.reward(["Eeab", ""], [[5, 6, 7, 8], []])
    assert scores == [0.5, 0.0]
    state = type("State", (), {"global_step": 1})
    rollouts.on_log(None, state, None, logs={"train_loss": 1.0})
    assert capsys.readouterr().out == ""
    rollouts.on_log(None, state, None, logs={"reward": 0.25})
    out = capsys.readouterr().out
    assert out.startswith("step 1: reward 0.250; rollout 4 tokens in ")
    assert out.endswith("eager path; model.embed_tokens has forward hooks\n")
    rollouts.close()
    torch_paged.restore(model)


@pytest.mark.parametrize(
    ("method", "packed", "forgotten"),
    [("gguf", False, True), ("gguf", True, False), ("fp8", False, False)],
)
def test_only_an_unpacked_gguf_file_is_forgotten(
    method: str, packed: bool, forgotten: bool, script: ModuleType
) -> None:
    model = tiny_model()
    script.forget_unpacked_format(model)
    quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method=method))
    quantizer.remove_quantization_config = lambda model: setattr(model, "is_quantized", False)
    model.hf_quantizer, model.is_quantized = quantizer, True
    if packed:
        model.register_buffer("blocks", torch.zeros(4, dtype=torch.uint8))
    script.forget_unpacked_format(model)
    assert model.is_quantized is not forgotten


def run_script(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "trl_grpo.py"), *options],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
    )


def trained(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """Train a tiny model; return it, the rollouts and the ids that were drawn in each step."""
    drawn: list[list[list[int]]] = []
    reward = script.Rollouts.reward

    def recorded(self: Any, completions: Any, completion_ids: Any, **columns: Any) -> Any:
        drawn.append(completion_ids)
        return reward(self, completions, completion_ids, **columns)

    sizes = ["--device", "cpu", "--steps", "3", "--max-new-tokens", "8", "--learning-rate", "1e-2"]
    options = script.parse_arguments([*sizes, *arguments])
    model = tiny_model()
    if not options.plain:
        torch_paged.accelerate(model)
    with monkeypatch.context() as patch:
        patch.setattr(script.Rollouts, "reward", recorded)
        rollouts = script.train(model, byte_tokenizer(), options)
    return model, rollouts, drawn


@needs_trl
def test_training_takes_the_fast_path_and_draws_what_hugging_face_draws(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rollouts, drawn = trained(script, monkeypatch)
    assert rollouts.paths == {"fused": 3}
    assert torch_paged.stats(model).fallbacks == {}
    assert len(drawn) == len(rollouts.rewards) == 3
    plain, plain_rollouts, expected = trained(script, monkeypatch, "--plain")
    assert plain_rollouts.paths == {"plain": 3}
    assert drawn == expected
    assert rollouts.rewards == plain_rollouts.rewards
    # The weights have moved far enough that rollouts from the first ones would differ.
    before = tiny_model().state_dict()
    moved = [(p - before[name]).abs().max() for name, p in model.named_parameters()]
    assert min(moved) > 1e-3
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            model.get_parameter(name), parameter, rtol=1e-5, atol=1e-6, msg=name
        )
    torch_paged.restore(model)


@needs_trl
def test_with_gradient_checkpointing_each_fallback_is_counted_with_its_reason(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rollouts, _ = trained(script, monkeypatch, "--gradient-checkpointing")
    fallbacks = torch_paged.stats(model).fallbacks
    assert set(rollouts.paths) <= {"fused", "eager"} and sum(rollouts.paths.values()) == 3
    assert sum(fallbacks.values()) == rollouts.paths["eager"]
    torch_paged.restore(model)


@needs_trl
def test_the_program_trains_a_model_in_a_folder(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    sizes = ["--steps", "2", "--max-new-tokens", "6", "--device", "cpu"]
    result = run_script("--model", str(tmp_path), *sizes)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2", "Rollouts by path"]
    assert all(line.endswith("fused path, device loop") for line in lines[:2])
    assert lines[2] == "Rollouts by path: 2 fused"
    assert result.stderr == ""
