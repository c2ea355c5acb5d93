"""Prompts with images: Hugging Face's own prefill, our decoding, the same tokens."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from models import (
    CACHE_NAME,
    cache_of,
    generator_states,
    greedy,
    prompt,
    seeded,
    smallest_gap,
)
from multimodal import IMAGE, KINDS, Picture, inputs_for, tiny_multimodal
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedModel

import torch_paged

WITH_WINDOW = ["llava-mistral", "gemma3"]
WITHOUT_WINDOW = [name for name in KINDS if name not in WITH_WINDOW]
GRIDS = [name for name, kind in KINDS.items() if kind.grids]
# Two images beside one beside none: 40 new tokens take each row past blocks of the cache.
ROWS: list[list[int | Picture]] = [
    [5, Picture((1, 4, 4), 1), 4, Picture((1, 4, 8), 2), 3],
    [7, Picture((1, 8, 4), 3), 6],
    [9],
]
NUM_TOKENS = 40
# Of the two best logits. Rounding moves them by less than a hundredth of this.
LEAST_GAP = 5e-4


class Unknown(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


class Collector:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        self.rows.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.rows.append([])


class Case:
    """A model, its untouched copy and the inputs of a batch."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.model = tiny_multimodal(name, device)
        self.untouched = copy.deepcopy(self.model)
        self.inputs = inputs_for(name, ROWS, device)

    def expected(self, num_tokens: int = NUM_TOKENS, **kwargs: Any) -> Tensor:
        """Return what Hugging Face generates greedily, no token of it decided by a near tie."""
        output = greedy(
            self.untouched,
            num_tokens=num_tokens,
            return_dict_in_generate=True,
            output_logits=True,
            **{**split(self.inputs), **kwargs},
        )
        assert smallest_gap(output.logits) > LEAST_GAP
        return output.sequences

    def compare(self, num_tokens: int = NUM_TOKENS, **kwargs: Any) -> None:
        """Generate with both, from inputs changed by kwargs; the tokens must be equal."""
        expected = self.expected(num_tokens, **kwargs)
        got = greedy(self.model, num_tokens=num_tokens, **{**split(self.inputs), **kwargs})
        assert torch.equal(got, expected)
        self.assert_fused()

    def assert_fused(self) -> None:
        last = torch_paged.explain(self.model).last_call
        assert last is not None and last.path == "fused", last


def split(inputs: dict[str, Any]) -> dict[str, Any]:
    """Name the ids as `greedy` does."""
    return {"ids": inputs["input_ids"], **{k: v for k, v in inputs.items() if k != "input_ids"}}


def text_of(model: Any) -> nn.Module:
    body = model.model
    return body.language_model if hasattr(body, "language_model") else body.text_model


def forbid_decoding(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the text model's forward, and its layer's, raise for anything but a prompt."""
    for module in (text_of(model), text_of(model).layers[0]):
        original = type(module).forward

        def forward(self, *args, _original=original, **kwargs):
            states = args[0] if args else kwargs["inputs_embeds"]
            assert states is None or states.shape[1] > 1, "a token was decoded by Hugging Face"
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(type(module), "forward", forward)


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
        "lagged": {"streamer": Collector()},
        "stepped": {"logits_processor": [Unknown()]},
    }.items():
        rows = slice(0, 1) if loop == "lagged" else slice(None)
        inputs = inputs_for(case.name, ROWS[rows], case.device)
        got = greedy(case.model, num_tokens=NUM_TOKENS, **split(inputs), **options)
        assert torch.equal(got[:, -NUM_TOKENS:], expected[rows, width:]), loop
        last = torch_paged.explain(case.model).last_call
        assert (last.path, last.loop) == ("fused", loop)
    stats = torch_paged.stats(case.model)
    assert stats.fallbacks == {} and stats.kv_blocks_used == 0
    with pytest.raises(AssertionError, match="decoded by Hugging Face"):
        text_of(case.model)(torch.ones_like(case.inputs["input_ids"][:, :1]))


def test_model_is_read_once(case) -> None:
    from torch_paged.generate.registry import find_session

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
    ids = prompt(21, 4, IMAGE, case.device)
    kinds = torch.zeros_like(ids)
    extra = {}
    if KINDS[case.name].grids:
        extra = {"mm_token_type_ids": kinds}
    elif case.name == "gemma3":
        extra = {"token_type_ids": kinds}
    case.inputs = {"input_ids": ids}
    expected = case.expected(24)
    greedy(case.model, ids, 2)
    # Our own prefill, whatever the processor adds.
    original = type(case.model).forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        raise AssertionError("the model's own forward ran")

    monkeypatch.setattr(type(case.model), "forward", forward)
    assert torch.equal(greedy(case.model, ids), expected)
    assert torch.equal(greedy(case.model, ids, **extra), expected)
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


@pytest.mark.parametrize("name", WITH_WINDOW)
def test_next_turn_with_a_window_falls_back(name, device) -> None:
    case = Case(name, device)
    torch_paged.accelerate(case.model)
    turns = []
    for model in (case.model, case.untouched):
        first = greedy(model, return_dict_in_generate=True, **split(case.inputs))
        ids = torch.cat([first.sequences, first.sequences[:, -4:]], 1)
        mask = case.inputs["attention_mask"]
        mask = torch.cat([mask, mask.new_ones(3, 28)], 1)
        turns.append(greedy(model, ids, attention_mask=mask, **{CACHE_NAME: cache_of(first)}))
    assert torch.equal(*turns)
    last = torch_paged.explain(case.model).last_call
    assert last.reasons == ("a cache was passed in, and a layer has a sliding window",)


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


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
        ({"use_cache": False}, "use_cache=False"),
        ({"prompt_lookup_num_tokens": 2}, "assisted decoding of a prompt with images"),
    ],
    ids=["attentions", "no cache", "lookup"],
)
@pytest.mark.parametrize("name", ["llava-llama", "qwen2_5_vl"])
def test_what_is_not_served_falls_back(name, options, why, device) -> None:
    case = Case(name, device)
    torch_paged.accelerate(case.model)
    inputs = inputs_for(name, ROWS[:1], device)
    got, expected = (
        greedy(model, **split(inputs), **options) for model in (case.model, case.untouched)
    )
    if "return_dict_in_generate" in options:
        got, expected = got.sequences, expected.sequences
    assert torch.equal(got, expected)
    assert torch_paged.explain(case.model).last_call.reasons[0] == why


def test_prompt_that_ends_with_an_image_falls_back(device) -> None:
    case = Case("qwen2_vl", device)
    torch_paged.accelerate(case.model)
    inputs = inputs_for("qwen2_vl", [[5, Picture((1, 4, 8), 1)]], device)
    # Without the mark of the image's end.
    inputs = {
        k: v[:, :-1] if v.shape[0] == 1 and "grid" not in k else v for k, v in inputs.items()
    }
    got, expected = (greedy(m, **split(inputs)) for m in (case.model, case.untouched))
    assert torch.equal(got, expected)
    (why,) = torch_paged.explain(case.model).last_call.reasons
    assert why.startswith("the prompt ends with an image")


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


class TestEngines:
    def test_text_alone_is_served(self, case) -> None:
        prompts = [prompt(n, n, IMAGE)[0].tolist() for n in (5, 16, 21)]
        expected = [
            greedy(case.untouched, torch.tensor([ids], device=case.device))[0, len(ids) :]
            for ids in prompts
        ]
        results = case.model.generate_batch(prompts, max_new_tokens=24, do_sample=False)
        assert [r.generated_tokens for r in results.values()] == [e.tolist() for e in expected]
        with torch_paged.Engine(case.model) as engine:
            for ids in prompts:
                engine.add_request(ids, max_new_tokens=24)
            outputs = engine.run()
        assert [list(o.token_ids) for o in outputs.values()] == [e.tolist() for e in expected]

    def test_images_are_refused(self, case) -> None:
        ids = case.inputs["input_ids"][1].tolist()
        refused = torch_paged.errors.UnsupportedFeatureError
        with torch_paged.Engine(case.model) as engine:
            with pytest.raises(refused, match=f"got the id {IMAGE} of an image"):
                engine.add_request(ids)
            with pytest.raises(refused, match=r"got pixel_values; call model\.generate"):
                engine.add_request(ids[:2], pixel_values=case.inputs["pixel_values"])
            assert engine.run() == {}
        with pytest.raises(refused, match=f"got the id {IMAGE} of an image"):
            case.model.generate_batch([ids], max_new_tokens=2)
        with pytest.raises(refused, match="got pixel_values"):
            case.model.generate_batch([ids[:2]], pixel_values=case.inputs["pixel_values"])
