"""Acceleration can be put on, changed and taken off without a trace."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Iterator

import pytest
import torch
from models import greedy, prompt, reference, seeded, tiny, tiny_family
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.generation import GenerationMixin

import torch_paged
from torch_paged.errors import TorchPagedError

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def snapshot(model) -> dict:
    """What must not change: classes, attributes, hooks, parameter objects, configs."""
    return {
        name: (
            type(module),
            sorted(vars(module)),
            [list(getattr(module, hook)) for hook in HOOKS],
            {key: id(value) for key, value in module._parameters.items()},
            module.training,
        )
        for name, module in model.named_modules()
    } | {"config": model.config.to_dict(), "generation": model.generation_config.to_dict()}


@pytest.fixture
def model(device):
    return tiny(LlamaConfig, 8, device)


@pytest.fixture
def ids(device):
    return prompt(17, 17, device=device)


def test_same_object_comes_back_and_says_so(model) -> None:
    assert not torch_paged.is_accelerated(model)
    assert torch_paged.accelerate(model) is model
    assert torch_paged.is_accelerated(model)
    torch_paged.restore(model)
    assert not torch_paged.is_accelerated(model)


def test_restore_leaves_no_trace(model, ids) -> None:
    original = GenerationMixin._sample
    expected = reference(model, ids).sequences
    before, weights = snapshot(model), copy.deepcopy(model.state_dict())
    torch_paged.accelerate(model, on_unsupported="raise")
    assert snapshot(model) == before
    greedy(model, ids)
    assert snapshot(model) == before
    torch_paged.restore(model)
    assert snapshot(model) == before
    assert GenerationMixin._sample is original
    assert list(model.state_dict()) == list(weights)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(greedy(model, ids), expected)


def test_the_patched_method_goes_with_the_last_model(model, ids, device) -> None:
    original = GenerationMixin._sample
    other = tiny(LlamaConfig, 5, device)
    expected = reference(other, ids).sequences
    torch_paged.accelerate(model)
    torch_paged.accelerate(other, on_unsupported="raise")
    torch_paged.restore(model)
    assert torch.equal(greedy(other, ids), expected)
    assert torch_paged.explain(other).last_call.path == "fused"
    del other
    gc.collect()
    assert GenerationMixin._sample is original


@pytest.fixture
def original_sample() -> Iterator[object]:
    """The method of transformers, put back after a test that patches it."""
    original = GenerationMixin._sample
    yield original
    GenerationMixin._sample = original


def test_patch_of_somebody_else_survives(model, ids, original_sample) -> None:
    expected = reference(model, ids).sequences
    calls: list[str] = []
    torch_paged.accelerate(model)
    underneath = GenerationMixin._sample

    def theirs(self, *args, **kwargs):
        calls.append("theirs")
        return underneath(self, *args, **kwargs)

    GenerationMixin._sample = theirs
    assert torch.equal(greedy(model, ids), expected)
    torch_paged.restore(model)
    assert GenerationMixin._sample is theirs
    assert torch.equal(greedy(model, ids), expected)
    assert calls == ["theirs", "theirs"]
    torch_paged.accelerate(model)
    assert torch.equal(greedy(model, ids), expected)
    torch_paged.restore(model)
    assert GenerationMixin._sample is theirs


def test_context_manager_restores(model, ids) -> None:
    original = GenerationMixin._sample
    with torch_paged.accelerated(model, block_size=8) as inside:
        assert inside is model and torch_paged.is_accelerated(model)
        greedy(model, ids, 4)
    assert not torch_paged.is_accelerated(model)
    with pytest.raises(ZeroDivisionError), torch_paged.accelerated(model):
        raise ZeroDivisionError
    assert not torch_paged.is_accelerated(model)
    assert GenerationMixin._sample is original


def test_copies_are_not_accelerated(model, ids, accelerate) -> None:
    expected = reference(model, ids).sequences
    accelerate(model)
    greedy(model, ids)
    for copied in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert not torch_paged.is_accelerated(copied)
        assert type(copied) is type(model)
        assert torch.equal(greedy(copied, ids), expected)


def test_saved_files_do_not_change(model, ids, tmp_path, accelerate) -> None:
    expected = reference(model, ids).sequences
    model.save_pretrained(tmp_path / "before")
    accelerate(model)
    greedy(model, ids)
    model.save_pretrained(tmp_path / "after")
    before = sorted(p.name for p in (tmp_path / "before").iterdir())
    assert sorted(p.name for p in (tmp_path / "after").iterdir()) == before
    for name in before:
        assert (tmp_path / "after" / name).read_bytes() == (
            tmp_path / "before" / name
        ).read_bytes()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "after", attn_implementation="eager")
    assert torch.equal(greedy(loaded.to(ids.device), ids), expected)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_training_is_unchanged(family, device, accelerate) -> None:
    model = tiny_family(family, device)
    ids = prompt(17, 17, device=device)
    untouched = copy.deepcopy(model)
    accelerate(model)
    greedy(model, ids, 8)
    for m in (untouched, model):
        m.train()
        m(ids, labels=ids).loss.backward()
    for ours, theirs in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    # In train mode too, and without a change of mode.
    assert torch.equal(greedy(model, ids, 8), greedy(untouched, ids, 8))
    assert all(module.training for module in model.modules())


def test_dropout_in_train_mode(device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device, attention_dropout=0.3)
    ids = prompt(17, 17, device=device)
    untouched = copy.deepcopy(model).train()
    accelerate(model, on_unsupported="fallback").train()
    expected = seeded(untouched, 3, ids, max_new_tokens=12, do_sample=False)
    got = seeded(model, 3, ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(got.result, expected.result)
    assert torch.equal(got.states[-1], expected.states[-1])
    model.eval()
    assert torch.equal(greedy(model, ids, 12), greedy(untouched.eval(), ids, 12))


def test_gradient_checkpointing_in_train_mode(device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids = prompt(17, 17, device=device)
    model.gradient_checkpointing_enable()
    untouched = copy.deepcopy(model).train()
    accelerate(model, on_unsupported="fallback").train()
    assert torch.equal(greedy(model, ids, 12), greedy(untouched, ids, 12))


def test_two_models_at_a_time(device, accelerate) -> None:
    first, second = tiny(LlamaConfig, 8, device), tiny_family("qwen3", device)
    ids = prompt(17, 17, device=device)
    expected = [reference(m, ids).sequences for m in (first, second)]
    accelerate(first, block_size=8)
    accelerate(second, block_size=32)
    for _ in range(2):
        assert torch.equal(greedy(first, ids), expected[0])
        assert torch.equal(greedy(second, ids), expected[1])
    torch_paged.restore(first)
    assert torch.equal(greedy(second, ids), expected[1])


def test_second_accelerate_reconfigures(model, ids, accelerate) -> None:
    expected = reference(model, ids, 30).sequences
    blocks = {}
    for block_size in (8, 32):
        accelerate(model, block_size=block_size)
        assert torch.equal(greedy(model, ids, 30), expected)
        stats = torch_paged.stats(model)
        blocks[block_size] = stats.kv_bytes / stats.kv_blocks_total
    assert blocks[32] == 4 * blocks[8]
    original = GenerationMixin._sample
    torch_paged.restore(model)
    assert GenerationMixin._sample is not original, "one restore undoes two accelerates"


def test_deleted_model_is_freed(device) -> None:
    original = GenerationMixin._sample
    model = tiny(LlamaConfig, 8, device)
    ids = prompt(17, 17, device=device)
    torch_paged.accelerate(model)
    greedy(model, ids, return_dict_in_generate=True, output_logits=True)
    report, stats = torch_paged.explain(model), torch_paged.stats(model)
    dead = [weakref.ref(model), weakref.ref(model.lm_head.weight)]
    del model
    gc.collect()
    assert [reference() for reference in dead] == [None, None]
    assert report.last_call is not None and stats.tokens
    assert GenerationMixin._sample is original


def test_models_that_share_a_config(model, ids, device, accelerate) -> None:
    other = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager")
    other = other.to(device).eval()
    expected = reference(model, ids).sequences
    accelerate(model)
    for _ in range(2):
        assert torch.equal(greedy(model, ids), expected)
        assert model.config._attn_implementation == "eager"
        assert other.config._attn_implementation == "eager"
    torch_paged.restore(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementation_is_left_alone(implementation, ids, device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device)
    expected = reference(model, ids).sequences
    model.set_attn_implementation(implementation)
    accelerate(model)
    assert torch.equal(greedy(model, ids), expected)
    assert model.config._attn_implementation == implementation


def test_release_gives_the_cache_back(model, ids, accelerate) -> None:
    expected = reference(model, ids).sequences
    accelerate(model)
    for _ in range(2):
        assert torch.equal(greedy(model, ids), expected)
        assert torch_paged.stats(model).kv_bytes > 0
        torch_paged.release(model)
        assert torch_paged.stats(model).kv_bytes == 0
        assert torch_paged.is_accelerated(model)


def test_pool_is_level_over_many_calls(model, device, accelerate) -> None:
    accelerate(model)
    sizes = []
    for call in range(24):
        generator = torch.Generator().manual_seed(call % 6)
        length = int(torch.randint(1, 60, (1,), generator=generator))
        greedy(model, prompt(length, call, device=device).repeat(1 + call % 3, 1), 6)
        stats = torch_paged.stats(model)
        assert stats.kv_blocks_used == 0
        sizes.append(stats.kv_bytes)
    assert sizes[-1] == sizes[11]


def test_disabled_by_the_environment(model, ids, monkeypatch) -> None:
    expected = reference(model, ids).sequences
    monkeypatch.setenv("TORCH_PAGED_DISABLE", "1")
    assert torch_paged.accelerate(model) is model
    assert not torch_paged.is_accelerated(model)
    assert torch.equal(greedy(model, ids), expected)
    with pytest.raises(TorchPagedError, match="TORCH_PAGED_DISABLE is set.*unset it"):
        torch_paged.Engine(model)
