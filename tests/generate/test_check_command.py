"""Where a model's step parts from Hugging Face's forward is found, and named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_paged.__main__ import main
from torch_paged.decoder import bind_attention
from torch_paged.decoder.lowering import lower
from torch_paged.decoder.step import DecoderStep
from torch_paged.generate.check.comparison import compare_model
from torch_paged.generate.check.plan_walk import title_of
from torch_paged.generate.check.points import match, measure
from torch_paged.generate.support.zoo import tiny_model
from torch_paged.patches import attention_switch, families
from torch_paged.patches.traits import PRE_NORMS, NormNames

ROWS = {module.partition(".")[0]: (module, cls) for module, cls in families.LLAMA_LIKE}


def break_row(monkeypatch: pytest.MonkeyPatch, family: str, **traits: Any) -> None:
    key = ROWS[family]
    broken = replace(families.LLAMA_LIKE[key], **traits)
    monkeypatch.setitem(families.FAMILIES, key, families._llama_like(key[0], broken))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["gemma3_text", "cohere2", "gpt_neox", "phi3", "phimoe"])
def test_model_agrees(model_type: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", model_type, "--dtype", dtype, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert f"tier      {'patched' if model_type == 'phimoe' else 'fused'}" in out
    assert "\nprefill " in out and "\ndecode " in out
    assert "compared values agree." in out and "<- parts" not in out
    assert "The self-test of accelerate() passes." in out


# family, what its row says wrongly, where that shows, what our op is, where Hugging Face has it
FAULTS = [
    pytest.param(
        "gemma2",
        {"norm_offset": 0.0},
        "layer 0, norm before attention",
        "x0 = rms_norm[model.layers.0.input_layernorm](h)",
        "the output of model.layers.0.input_layernorm",
        id="gain without its offset",
    ),
    pytest.param(
        "jais2",
        {"norm_kind": "rms"},
        "layer 0, norm before attention",
        "x0 = rms_norm[model.layers.0.input_layernorm](h)",
        "the output of model.layers.0.input_layernorm",
        id="wrong kind of norm",
    ),
    pytest.param(
        "qwen3",
        {"head_norms": None},
        "layer 0, attention",
        "a0 = attention[0: 4/2x8](q0, k0, v0, cos0, sin0)",
        "the input of model.layers.0.self_attn.o_proj",
        id="no norm on q and k",
    ),
    pytest.param(
        "smollm3",
        {"rotary_layers": "all"},
        "layer 0, attention",
        "a0 = attention[0: 4/2x8](q0, k0, v0, cos0, sin0)",
        "the input of model.layers.0.self_attn.o_proj",
        id="rotary where there is none",
    ),
    pytest.param(
        "mistral",
        {"window": "none"},
        "layer 0, attention",
        "a0 = attention[0: 4/2x8](q0, k0, v0, cos0, sin0)",
        "the input of model.layers.0.self_attn.o_proj",
        id="no window",
    ),
    pytest.param(
        "gemma",
        {"scaled_embedding": False},
        "embedding",
        "h = embed[model.embed_tokens](ids)",
        "the output of model.embed_tokens",
        id="embedding without its scale",
    ),
    pytest.param(
        "granite",
        {"multipliers": False},
        "embedding",
        "h = embed[model.embed_tokens](ids)",
        "the input of model.layers.0.input_layernorm",
        id="embedding without its multiplier",
    ),
    pytest.param(
        "glm4",
        {"norms": PRE_NORMS},
        "layer 0, residual behind attention",
        "y0, r0 = add_rms_norm[model.layers.0.post_attention_layernorm](o0, h)",
        "the input of model.layers.0.post_attention_layernorm",
        id="no norm behind attention",
    ),
    pytest.param(
        "llama",
        {"norms": NormNames("input_layernorm", None), "parallel": True},
        "layer 0, norm before attention",
        "x0 = rms_norm[model.layers.0.input_layernorm](h)",
        "the input of model.layers.0.mlp.gate_proj",
        id="MLP reads another value",
    ),
]


@pytest.mark.parametrize(("family", "traits", "where", "op", "place"), FAULTS)
def test_wrong_row_is_found_and_its_place_named(
    family: str,
    traits: dict[str, Any],
    where: str,
    op: str,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_row(monkeypatch, family, **traits)
    assert main(["check", family, "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    first = lines.index(f"They first part in prefill at {where}:")
    assert lines[first + 1] == f"  ours          {op}"
    assert lines[first + 2] == f"  Hugging Face  {place}"
    title = where.removeprefix("layer 0, ")
    assert any(line.startswith(title) and line.endswith("<- parts") for line in lines)
    assert any("self-test: logits differ" in line for line in lines)


def test_error_does_not_spread_to_what_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    break_row(monkeypatch, "smollm3", rotary_layers="all")
    found = compare_model(tiny_model("smollm3"))
    # Layer 0 alone has no rotary embedding.
    assert {point.where for point in found.points if point.parts} == {"layer 0, attention"}
    assert len({point.where for point in found.points}) > 30


def test_logits_without_their_scale_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_paged.patches.llama_like._logit_scale", lambda *args: 1.0)
    found = compare_model(tiny_model("cohere"))
    assert {point.where for point in found.points if point.parts} == {"logits"}


def test_fault_of_the_decode_step_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = bind_attention.fused_decode_attention

    def narrow(*args: Any, window: int, **kwargs: Any) -> torch.Tensor:
        return own(*args, window=3, **kwargs)

    monkeypatch.setattr(bind_attention, "fused_decode_attention", narrow)
    found = compare_model(tiny_model("llama"))
    parted = {(point.phase, point.title) for point in found.points if point.parts}
    assert parted == {("decode", "attention")}


@pytest.fixture
def fused_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode by the plan that a GPU runs: norms, activations and sums within the projections."""
    monkeypatch.setattr(
        DecoderStep, "_fused_rows", lambda self, mode, rows: 64 * (mode == "decode")
    )


@pytest.mark.usefixtures("fused_decode")
@pytest.mark.parametrize(
    "model_type", ["llama", "gemma2", "gemma3_text", "olmo2", "glm4", "starcoder2", "granite"]
)
def test_fused_plan_agrees(model_type: str) -> None:
    found = compare_model(tiny_model(model_type))
    assert found.agrees and found.tier == "fused"
    ops = " ".join(point.op for point in found.points if point.phase == "decode")
    assert "+add[" in ops or "rms_norm+linear[" in ops


@pytest.mark.usefixtures("fused_decode")
def test_fault_in_a_fused_plan_names_the_fused_op(monkeypatch: pytest.MonkeyPatch) -> None:
    break_row(monkeypatch, "glm4", norms=PRE_NORMS)
    found = compare_model(tiny_model("glm4"))
    first = next(point for point in found.points if point.parts and point.phase == "decode")
    assert first.where == "layer 0, residual behind attention"
    assert first.op == "r0 = linear+add[model.layers.0.self_attn.o_proj](a0, h)"


def test_fault_of_switched_attention_names_the_layer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = attention_switch.paged_prefill_attention

    def scaled(*args: Any, scale: float, **kwargs: Any) -> torch.Tensor:
        return own(*args, scale=2 * scale, **kwargs)

    monkeypatch.setattr(attention_switch, "paged_prefill_attention", scaled)
    assert main(["check", "phimoe", "--device", "cpu", "--all"]) == 1
    out = capsys.readouterr().out
    assert "They first part in prefill at layer 0, model.layers.i.self_attn:" in out
    assert "  ours          PhimoeAttention\n" in out
    assert "  Hugging Face  the output of model.layers.0.self_attn\n" in out
    assert "\nalso part: prefill: layer 1, model.layers.i.self_attn\n" in out


def test_plan_that_raises_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("sizes do not match")

    monkeypatch.setattr("torch_paged.decoder.bind.glu", broken)
    assert main(["check", "llama", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "Our step fails:\n  RuntimeError: sizes do not match\n  at m0 = silu_glu(g0, u0)" in out


def test_folder_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    assert main(["check", str(tmp_path), "--device", "cpu", "--tokens", "40", "--all"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("model     llama.modeling_llama.LlamaForCausalLM, float32 on cpu\n")
    assert "\nlayer 1, attention " in out


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", "nowhere"),
        ("musicgen", "MODEL 'musicgen' is a type that is not built from a tiny config"),
    ],
)
def test_model_that_is_not_there_is_told(
    model: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", model]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("device", ["tpu9", "cuda:99"])
def test_device_that_is_not_there_is_told(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", "llama", "--device", device])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"--device: must be a device that torch can use here, got {device}: " in told


def test_eager_model_has_nothing_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "bart", "--device", "cpu"]) == 2
    out = capsys.readouterr().out
    assert "takes no position_ids" in out and "there is nothing to compare" in out


def test_window_that_the_prompt_does_not_reach_is_noted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "mistral", "--device", "cpu", "--tokens", "5"]) == 0
    assert "the prompt of 5 tokens is not longer than the window of 8" in capsys.readouterr().out


def test_model_is_left_as_it_was() -> None:
    model = tiny_model("llama").train()
    compare_model(model)
    assert model.training
    assert all(not module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("model_type", ["llama", "phi3", "olmo2", "gemma2", "gpt_neox", "cohere"])
def test_every_value_of_a_plan_has_a_title(model_type: str) -> None:
    spec = families.read_spec(tiny_model(model_type))
    for mode in ("decode", "prefill"):
        for instruction in lower(spec, mode).instructions:
            for value in instruction.targets:
                title, layer = title_of(value)
                assert title and (layer is None or layer < len(spec.layers))


def test_difference_is_relative_to_each_token() -> None:
    theirs = torch.tensor([[1000.0, 1000.0], [1.0, 1.0]])
    ours = theirs + torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    assert measure(ours, theirs) == pytest.approx((1.0, 0.001))
    # A small token is held against a hundredth of the whole.
    size = theirs.pow(2).mean().sqrt().item() / 100
    ours = theirs + torch.tensor([[0.0, 0.0], [0.5, 0.5]])
    assert measure(ours, theirs) == pytest.approx((0.5, 0.5 / size))


def test_what_is_not_a_number_parts() -> None:
    theirs = torch.ones(2, 2)
    assert not measure(theirs * float("nan"), theirs)[1] <= 1e9
    assert measure(theirs, None) == (float("inf"), float("inf"))


def test_last_tokens_are_matched() -> None:
    theirs = torch.arange(12.0).view(1, 4, 3)
    assert torch.equal(match(theirs, torch.empty(2, 3)), theirs[0, 2:])
    assert match(theirs, torch.empty(2, 4)) is None
    assert match(theirs, torch.empty(5, 3)) is None
