"""Prompts with images: Hugging Face's own prefill, our decoding, the same tokens."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from models import (
    CACHE_NAME,
    cache_of,
    generator_states,
    greedy,
    padded_prompts,
    prompt,
    seeded,
    smallest_gap,
)
from multimodal import IMAGE, KINDS, Picture, inputs_for
from multimodal_case import (
    LEAST_GAP,
    NUM_TOKENS,
    ROWS,
    WITHOUT_WINDOW,
    Case,
    forbid_decoding,
    split,
    text_of,
)
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

import torch_paged
from torch_paged.generate.registry import find_session

GRIDS = [name for name, kind in KINDS.items() if kind.grids]


class Unknown(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


class Forced(LogitsProcessor):
    """Has `sequences` chosen, whatever the scores are."""

    def __init__(self, sequences: Tensor) -> None:
        self.sequences = sequences

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens = self.sequences[:, input_ids.shape[1], None]
        return torch.full_like(scores, -1e9).scatter_(1, tokens, 0.0)


class Collector:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        self.rows.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.rows.append([])


@pytest.fixture(params=KINDS)
def case(request, device, accelerate) -> Case:
    case = Case(request.param, device)
    accelerate(case.model)
    return case


@pytest.fixture(params=GRIDS)
def grids_case(request, device, accelerate) -> Case:
    case = Case(request.param, device)
    accelerate(case.model)
    return case


def test_batch_with_images_of_several_sizes(case, monkeypatch) -> None:
    assert torch_paged.explain(case.model).tier == "fused"
    expected = case.expected()
    # Runs the self-test, which decodes with the model's own forward.
    greedy(case.model, num_tokens=2, **split(case.inputs))
    forbid_decoding(case.model, monkeypatch)
    width = case.inputs["input_ids"].shape[1]
    for loop, options in {
        "device": {},
        "lagged": {"streamer": (streamer := Collector())},
        "stepped": {"logits_processor": [Unknown()]},
    }.items():
        rows = slice(0, 1) if loop == "lagged" else slice(None)
        inputs = inputs_for(case.name, ROWS[rows], case.device)
        got = greedy(case.model, num_tokens=NUM_TOKENS, **split(inputs), **options)
        assert torch.equal(got[:, -NUM_TOKENS:], expected[rows, width:]), loop
        last = torch_paged.explain(case.model).last_call
        assert (last.path, last.loop) == ("fused", loop)
    assert streamer.rows[1:] == [[token] for token in expected[0, width:].tolist()] + [[]]
    stats = torch_paged.stats(case.model)
    assert stats.fallbacks == {} and stats.kv_blocks_used == 0
    with pytest.raises(AssertionError, match="decoded by Hugging Face"):
        text_of(case.model)(torch.ones_like(case.inputs["input_ids"][:, :1]))


def test_model_is_read_once(case) -> None:

    greedy(case.model, num_tokens=2, **split(case.inputs))
    session = find_session(case.model)
    assert session is not None
    before = session.core
    greedy(case.model, num_tokens=2, **split(case.inputs))
    assert session.core is before


def test_rows_of_equal_ids_have_their_own_images(case) -> None:
    rows = [[4, Picture(seed=seed), 5] for seed in (1, 2, 1)]
    inputs = inputs_for(case.name, rows, case.device)
    ids = inputs["input_ids"]
    ids[:] = ids[:1]
    expected = case.expected(20, **split(inputs))
    got = greedy(case.model, num_tokens=20, **split(inputs))
    assert torch.equal(got, expected)
    assert torch.equal(got[0], got[2]) and not torch.equal(got[0], got[1])


def test_error_in_bfloat16_is_that_of_hugging_face(case) -> None:
    """Teacher-forced, against the float32 model."""
    options = {"return_dict_in_generate": True, "output_logits": True}
    right = greedy(case.untouched, num_tokens=NUM_TOKENS, **split(case.inputs), **options)
    inputs = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in case.inputs.items()
    }
    options["logits_processor"] = [Forced(right.sequences)]
    errors = []
    for model in (case.model.bfloat16(), copy.deepcopy(case.untouched).bfloat16()):
        got = greedy(model, num_tokens=NUM_TOKENS, **split(inputs), **options)
        assert torch.equal(got.sequences, right.sequences)
        errors.append(torch.stack(got.logits).float() - torch.stack(right.logits))
    case.assert_fused()
    ours, theirs = errors
    assert float(ours.square().mean().sqrt()) <= 1.25 * float(theirs.square().mean().sqrt())
    assert float(ours.abs().max()) <= 2 * float(theirs.abs().max())


def test_sampling_draws_the_same_numbers(case) -> None:
    options = {**split(case.inputs), "max_new_tokens": 30, "top_k": 20, "temperature": 1.3}
    got = seeded(case.model, 3, **options)
    expected = seeded(case.untouched, 3, **options)
    assert torch.equal(got.result, expected.result)
    for ours, theirs in zip(got.states, expected.states, strict=True):
        assert torch.equal(ours, theirs)
    case.assert_fused()


@pytest.mark.parametrize(
    "options", [{"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3}]
)
def test_several_sequences_of_a_prompt(options, case) -> None:
    case.inputs = inputs_for(case.name, ROWS[:2], case.device)
    options = {"do_sample": False, "max_new_tokens": 20, **options}
    results = []
    for model in (case.model, case.untouched):
        torch.manual_seed(5)
        results.append((model.generate(**case.inputs, **options), generator_states()))
    (got, ours), (expected, theirs) = results
    assert torch.equal(got, expected)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    case.assert_fused()


def test_scores_logits_and_cache_are_returned(case) -> None:
    options = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    got = greedy(case.model, **split(case.inputs), **options)
    expected = greedy(case.untouched, **split(case.inputs), **options)
    assert torch.equal(got.sequences, expected.sequences)
    pairs = zip((*got.logits, *got.scores), (*expected.logits, *expected.scores), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    mask = case.inputs["attention_mask"]
    mask = torch.cat([mask, mask.new_ones(len(mask), 23)], 1)
    for ours, theirs in zip(cache_of(got).layers, cache_of(expected).layers, strict=True):
        assert type(ours) is type(theirs)
        keep = mask[:, -ours.keys.shape[2] :, None].bool()[:, None]
        for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert a.shape == b.shape
            torch.testing.assert_close(a * keep, b * keep, rtol=1e-4, atol=1e-4)
    case.assert_fused()


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_hardly_a_token(num_tokens, case) -> None:
    case.compare(num_tokens)
    got = greedy(
        case.model, num_tokens=num_tokens, return_dict_in_generate=True, **split(case.inputs)
    )
    width = case.inputs["input_ids"].shape[1]
    assert cache_of(got).get_seq_length() == width + num_tokens - 1


def test_end_tokens_and_padding(case) -> None:
    plain = case.expected()
    width = case.inputs["input_ids"].shape[1]
    ends = [int(plain[0, width + 5]), int(plain[1, width + 18])]
    case.compare(eos_token_id=ends)


def test_text_alone(case, monkeypatch) -> None:
    ids, mask = padded_prompts((5, 16, 21), case.device, IMAGE)
    kinds = torch.zeros_like(ids)
    extra = {}
    if KINDS[case.name].grids:
        extra = {"mm_token_type_ids": kinds}
    elif case.name == "gemma3":
        extra = {"token_type_ids": kinds}
    case.inputs = {"input_ids": ids, "attention_mask": mask}
    expected = case.expected(24)
    greedy(case.model, ids, 2)
    # Our own prefill, whatever the processor adds.
    original = type(case.model).forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        raise AssertionError("the model's own forward ran")

    monkeypatch.setattr(type(case.model), "forward", forward)
    assert torch.equal(greedy(case.model, ids, attention_mask=mask), expected)
    assert torch.equal(greedy(case.model, ids, attention_mask=mask, **extra), expected)
    case.assert_fused()


def test_other_images_in_the_next_call(case) -> None:
    for seed in (4, 5):
        rows = [
            [3, Picture((1, 4, 4 * (seed - 3)), seed), 6],
            [8, Picture((1, 4, 4), seed + 5), 2],
        ]
        case.inputs = inputs_for(case.name, rows, case.device)
        greedy_of = [
            greedy(model, num_tokens=20, **split(case.inputs))
            for model in (case.model, case.untouched)
        ]
        assert torch.equal(*greedy_of)
        deltas = [getattr(m.model, "rope_deltas", None) for m in (case.model, case.untouched)]
        assert (deltas[0] is None) == (deltas[1] is None) == (not KINDS[case.name].grids)
        assert deltas[0] is None or torch.equal(*deltas)
        text = prompt(9, seed, IMAGE, case.device)
        assert torch.equal(greedy(case.model, text), greedy(case.untouched, text))
        case.assert_fused()


@pytest.mark.parametrize("name", WITHOUT_WINDOW)
def test_next_turn_of_text_alone(name, device, accelerate, monkeypatch) -> None:
    case = Case(name, device)
    accelerate(case.model)
    case.inputs = inputs_for(name, ROWS[:2], device)
    turns = []
    for model in (case.model, case.untouched):
        first = greedy(model, num_tokens=20, return_dict_in_generate=True, **split(case.inputs))
        more = torch.cat([prompt(5, row, IMAGE, device) for row in (40, 41)])
        ids = torch.cat([first.sequences, more], 1)
        mask = case.inputs["attention_mask"]
        mask = torch.cat([mask, mask.new_ones(2, 25)], 1)
        kwargs = {"attention_mask": mask, CACHE_NAME: cache_of(first)}
        if model is case.model:
            monkeypatch.setattr(type(model), "_prefill", None)
        turns.append(greedy(model, ids, **kwargs))
        monkeypatch.undo()
    assert torch.equal(*turns)
    case.assert_fused()


@pytest.mark.parametrize("name", WITHOUT_WINDOW)
def test_image_behind_a_cache_of_text(name, device, accelerate) -> None:
    case = Case(name, device)
    accelerate(case.model)
    inputs = inputs_for(case.name, [[17, Picture((1, 4, 8), 3), 4]], case.device)
    turns = []
    for model in (case.model, case.untouched):
        text = {"attention_mask": inputs["attention_mask"][:, :12]}
        first = greedy(model, inputs["input_ids"][:, :12], 1, return_dict_in_generate=True, **text)
        turns.append(greedy(model, **split(inputs), **{CACHE_NAME: cache_of(first)}))
    assert torch.equal(*turns)
    case.assert_fused()


@pytest.mark.parametrize("grid", [(2, 4, 4), (3, 4, 8)], ids=str)
def test_videos(grid, grids_case) -> None:
    rows = [[6, Picture(grid, 1, video=True), 5], [3, Picture((1, 4, 4), 2), 4]]
    if grids_case.name.startswith("qwen3_vl"):
        # Its processor gives each frame a timestamp of its own.
        frames = [Picture((1, *grid[1:]), seed, video=True) for seed in range(grid[0])]
        rows[0] = [6, *(part for frame in frames for part in (frame, 2)), 5]
    inputs = inputs_for(grids_case.name, rows, grids_case.device)
    if grids_case.name == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([0.75])
    grids_case.inputs = inputs
    grids_case.compare(30)


# Qwen3-VL's layers take features of images, too, which embeddings do not hold.
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_merged_embeddings_with_their_positions(name, device, accelerate) -> None:
    """What the vision tower gives, merged by the caller."""
    case = Case(name, device)
    accelerate(case.model)
    model, inputs = case.untouched, inputs_for(name, ROWS[:2], device)
    ids = inputs["input_ids"]
    with torch.no_grad():
        features = model.model.get_image_features(
            inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True
        ).pooler_output
        embeds = model.get_input_embeddings()(ids)
        embeds = embeds.masked_scatter((ids == IMAGE)[..., None], torch.cat(features))
        positions, _ = model.model.get_rope_index(
            ids,
            mm_token_type_ids=inputs["mm_token_type_ids"],
            image_grid_thw=inputs["image_grid_thw"],
            attention_mask=inputs["attention_mask"],
        )
    kwargs = {
        "inputs_embeds": embeds,
        "attention_mask": inputs["attention_mask"],
        "position_ids": positions,
        "max_new_tokens": 24,
        "do_sample": False,
    }
    got = case.model.generate(**kwargs)
    assert torch.equal(got, model.generate(**kwargs))
    whole = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert torch.equal(got, whole[:, ids.shape[1] :])
    case.assert_fused()


def test_change_of_weights_shows(case) -> None:
    greedy(case.model, num_tokens=3, **split(case.inputs))
    with torch.no_grad():
        for model in (case.model, case.untouched):
            text_of(model).layers[1].mlp.down_proj.weight.mul_(1.7)
    got, expected = (
        greedy(
            m,
            num_tokens=12,
            return_dict_in_generate=True,
            output_logits=True,
            **split(case.inputs),
        )
        for m in (case.model, case.untouched)
    )
    assert smallest_gap(expected.logits) > LEAST_GAP
    assert torch.equal(got.sequences, expected.sequences)


def test_vision_tower_of_ones_own(case) -> None:
    """Its forward is Hugging Face's to call, so what hangs there does not matter."""
    name, tower = next(
        (name, module)
        for name, module in case.model.named_modules()
        if isinstance(module, PreTrainedModel) and "vis" in name
    )
    original, calls = tower.forward, []
    tower.forward = lambda *args, **kwargs: calls.append(name) or original(*args, **kwargs)
    case.compare(6)
    assert calls
    del tower.forward
