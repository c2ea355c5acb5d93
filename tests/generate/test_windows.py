"""Sliding windows: answers are Hugging Face's, and what has left the windows is given back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CACHE_NAME, prompt, smallest_gap, tiny
from torch import nn
from transformers import DynamicCache, Gemma2Config, Gemma3TextConfig, MistralConfig

import torch_paged
from torch_paged.engine.batch import BatchRun
from torch_paged.generate.registry import find_session

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, WINDOW, NEW = 8, 9, 60  # more than six windows
_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 8}
_TYPES = [*["sliding_attention"] * 3, "full_attention", "sliding_attention"]
# Name: config class, weight seed, fields, block tables (of all tokens, behind the window).
MODELS: dict[str, tuple[type, int, dict[str, Any], tuple[int, int]]] = {
    "mistral": (MistralConfig, 4, {"num_hidden_layers": 2}, (0, 1)),
    "gemma2": (Gemma2Config, 3, {"num_hidden_layers": 4, **_GEMMA}, (1, 1)),
    "gemma3": (
        Gemma3TextConfig,
        3,
        {"layer_types": _TYPES, "num_hidden_layers": 5, **_GEMMA},
        (1, 4),
    ),
}


def model_of(name: str) -> nn.Module:
    config_class, seed, fields, _ = MODELS[name]
    return tiny(config_class, seed, DEVICE, **{**_SMALL, **fields})


def most_blocks(name: str, num_tokens: int, slack: int) -> int:
    """Blocks of one row of `num_tokens` tokens, `slack` of them computed or given room at once."""
    full, windowed = MODELS[name][3]
    in_window = -(-(WINDOW - 1 + slack) // SIZE) + 1
    return full * -(-num_tokens // SIZE) + windowed * in_window


def answer(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Return the model's own greedy sequences; fail on a near tie."""
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **kwargs,
    )
    assert smallest_gap(list(out.scores)) > 1e-4, "a near tie: take another seed"
    return out.sequences


def left_padded(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [prompt(n, 7 + n, 64)[0] for n in lengths]
    width = max(lengths)
    ids, mask = torch.zeros(len(rows), width).long(), torch.zeros(len(rows), width).long()
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    return ids.to(DEVICE), mask.to(DEVICE)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill blocks with NaN as soon as a run gives them back; steps on the CPU have run by then."""
    if torch.cuda.is_available():
        return
    for name in ("_move_windows", "_ensure_blocks"):
        original = getattr(BatchRun, name)

        def poisoning(run: BatchRun, *args: Any, original: Any = original) -> None:
            original(run, *args)
            core = run._core
            free = [b for b in range(core.num_blocks) if core.allocator.refcount(b) == 0]
            for cache in (*core.pool.keys, *core.pool.values):
                cache[free] = float("nan")

        monkeypatch.setattr(BatchRun, name, poisoning)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks in use before each launch of a `generate()` call."""
    counts: list[int] = []
    for name in ("_prefill_group", "launch"):
        original = getattr(BatchRun, name)

        def counting(run: BatchRun, *args: Any, original: Any = original) -> Any:
            result = original(run, *args)
            counts.append(run._core.allocator.num_live)
            run._core.allocator.check_integrity()
            return result

        monkeypatch.setattr(BatchRun, name, counting)
    return counts


@pytest.mark.parametrize("lengths", [[5], [40], [3, 40, 17, 9]], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_generate_answers_alike_and_holds_the_windows_alone(
    name: str, lengths: list[int], accelerate: Callable[..., nn.Module], held: list[int]
) -> None:
    model = model_of(name)
    ids, mask = left_padded(lengths)
    expected = answer(model, ids, mask)
    accelerate(model, block_size=SIZE, max_num_batched_tokens=16, lag=4, verify=False)
    kwargs = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, attention_mask=mask, **kwargs), expected)
    # Blocks are handed out for 64 steps at a time.
    bound = sum(most_blocks(name, n + NEW, 64) for n in lengths)
    assert max(held) <= bound
    prefills = -(-sum(lengths) // 16)
    assert max(held[:prefills]) <= sum(most_blocks(name, n, min(n, 16)) for n in lengths)
    assert find_session(model).core.allocator.num_live == 0


@pytest.mark.parametrize("name", MODELS)
def test_long_decode_stays_in_a_pool_of_its_windows(
    name: str, accelerate: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of the whole context would not fit; those given back are written by others."""
    monkeypatch.setattr("torch_paged.engine.batch._STEPS_AHEAD", 4)
    defaults = {"steps_ahead": 4, "keeps": "nothing"}
    monkeypatch.setattr(BatchRun.__init__, "__kwdefaults__", defaults)
    # On a GPU, mapped memory comes in granules larger than this pool.
    monkeypatch.setattr("torch_paged.cache.pool.unsupported_reason", lambda device: "too coarse")
    model = model_of(name)
    lengths = [3, 40, 17]
    ids, mask = left_padded(lengths)
    expected = answer(model, ids, mask)
    accelerate(model, block_size=SIZE, max_num_batched_tokens=16, lag=4, verify=False)
    core = find_session(model).core
    core.prepare(1, 1, 1)
    limit = sum(most_blocks(name, n + NEW, 16) for n in lengths)
    monkeypatch.setattr(core, "make_room_beyond", core.make_room)
    core.pool.max_bytes = limit * core.pool.block_bytes
    kwargs = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, attention_mask=mask, **kwargs), expected)
    assert core.num_blocks <= limit
    tables = sum(MODELS[name][3])
    assert limit < tables * sum(-(-(n + NEW) // SIZE) for n in lengths)
    assert torch_paged.stats(model).kv_bytes == core.num_blocks * core.pool.block_bytes


@pytest.mark.parametrize("name", MODELS)
def test_engine_answers_alike_and_holds_the_windows_alone(name: str) -> None:
    model = model_of(name)
    lengths = [5, 40, 17]
    prompts = [prompt(n, 7 + n, 64, device=DEVICE) for n in lengths]
    expected = [answer(model, p, torch.ones_like(p))[0, p.shape[1] :].tolist() for p in prompts]
    mine = copy.deepcopy(model)
    config = {"block_size": SIZE, "max_num_batched_tokens": 16, "lag": 4}
    with torch_paged.Engine(mine, on_unsupported="raise", **config) as engine:
        names = [engine.add_request(p[0].tolist(), max_new_tokens=NEW) for p in prompts]
        core, most, outputs = find_session(mine).core, 0, {}
        while not engine.is_idle:
            for out in engine.step():
                outputs[out.request_id] = list(out.token_ids)
            engine.check_integrity()
            most = max(most, core.allocator.num_live)
        assert core.allocator.num_live == 0
    assert [outputs[n] for n in names] == expected
    assert most <= sum(most_blocks(name, n + NEW, 16) for n in lengths)


@pytest.mark.parametrize("name", MODELS)
def test_beams_share_windows_and_answer_alike(
    name: str, accelerate: Callable[..., nn.Module], held: list[int]
) -> None:
    model = model_of(name)
    ids, mask = left_padded([19, 6])
    kwargs = {"max_new_tokens": 30, "do_sample": False, "num_beams": 3, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=mask, **kwargs)
    accelerate(model, block_size=SIZE, max_num_batched_tokens=16)
    assert torch.equal(model.generate(ids, attention_mask=mask, **kwargs), expected)
    assert find_session(model).last_call.loop == "stepped" and held
    assert find_session(model).core.allocator.num_live == 0


@pytest.mark.parametrize("stops", [False, True], ids=["limit", "end token"])
@pytest.mark.parametrize("num_beams", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_returned_cache_is_what_the_model_returns(
    name: str,
    num_beams: int,
    stops: bool,
    accelerate: Callable[..., nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defaults = {"steps_ahead": 1, "keeps": "nothing"}  # drops as early and as often as it can
    monkeypatch.setattr(BatchRun.__init__, "__kwdefaults__", defaults)
    model = model_of(name)
    ids, mask = left_padded([19, 12])
    kwargs = {"max_new_tokens": 31, "do_sample": False, "pad_token_id": 0, "num_beams": num_beams}
    kwargs |= {"attention_mask": mask, "return_dict_in_generate": True}
    if stops:
        # Ends where the steps in flight behind the end make the windows leave a block.
        new = model.generate(ids, **kwargs).sequences[:, ids.shape[1] :]
        kwargs["eos_token_id"] = new[:, 26].tolist()
    expected = model.generate(ids, **kwargs)
    accelerate(model, block_size=SIZE, max_num_batched_tokens=16, lag=4)
    got = model.generate(ids, **kwargs)
    assert torch.equal(got.sequences, expected.sequences)
    pairs = zip(got.past_key_values.layers, expected.past_key_values.layers, strict=True)
    for own, theirs in pairs:
        assert type(own) is type(theirs) and own.get_seq_length() == theirs.get_seq_length()
        # Columns of padding, 7 in the short row, hold anything.
        real = theirs.keys.shape[2] - (0 if getattr(theirs, "is_sliding", False) else 7)
        for mine, reference in ((own.keys, theirs.keys), (own.values, theirs.values)):
            assert mine.shape == reference.shape
            near = {"rtol": 1e-4, "atol": 1e-4}
            torch.testing.assert_close(mine[..., -real:, :], reference[..., -real:, :], **near)


@pytest.mark.parametrize("name", MODELS)
def test_released_memory_is_taken_again(name: str, accelerate: Callable[..., nn.Module]) -> None:
    model = model_of(name)
    ids, mask = left_padded([19, 6])
    expected = answer(model, ids, mask)
    accelerate(model, block_size=SIZE)
    kwargs = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    for _ in range(2):
        assert torch.equal(model.generate(ids, attention_mask=mask, **kwargs), expected)
        torch_paged.release(model)
        assert torch_paged.stats(model).kv_bytes == 0


@pytest.mark.parametrize("name", MODELS)
def test_plain_cache_of_the_caller_gets_every_token(
    name: str, accelerate: Callable[..., nn.Module]
) -> None:
    """It has no windows: what ours would have dropped is kept for it."""
    model = model_of(name)
    ids, mask = left_padded([19, 19])
    kwargs = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    expected, got = DynamicCache(), DynamicCache()
    theirs = model.generate(ids, **{CACHE_NAME: expected}, **kwargs)
    accelerate(model, block_size=SIZE, max_num_batched_tokens=16, lag=4)
    assert torch.equal(model.generate(ids, **{CACHE_NAME: got}, **kwargs), theirs)
    for own, reference in zip(got.layers, expected.layers, strict=True):
        near = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(own.keys, reference.keys, **near)
        torch.testing.assert_close(own.values, reference.values, **near)
