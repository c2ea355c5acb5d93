"""Rotary embeddings of every kind, past the length at which their frequencies change."""

from __future__ import annotations

import copy

import pytest
import torch
from models import DROP, greedy, padded_prompts, prompt, tiny
from transformers import (
    CohereConfig,
    Ernie4_5Config,
    Gemma3TextConfig,
    GlmConfig,
    GPTNeoXConfig,
    LlamaConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    SmolLM3Config,
)

import torch_paged
from torch_paged.generate.check.comparison import compare_model

LIMIT = 64
HALF = 8  # of a head


def long(limit: int = LIMIT, **fields) -> dict[str, object]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.05 * i for i in range(HALF)],
        "long_factor": [1.5 + 0.6 * i for i in range(HALF)],
        "original_max_position_embeddings": limit,
        **fields,
    }


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
KINDS = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "dynamic": DYNAMIC,
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    "yarn_factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "attention_factor": 1.7,
        "original_max_position_embeddings": LIMIT,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "mscale": 0.9,
        "mscale_all_dim": 0.4,
        "beta_fast": 16,
        "beta_slow": 2,
        "original_max_position_embeddings": LIMIT,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": LIMIT,
    },
    "longrope": long(),
    "longrope_factor": long(factor=4.0, attention_factor=1.3),
}
CHANGING = ["dynamic", "longrope"]
SHORT = {"max_position_embeddings": 16}


def llama(kind: str, device, seed: int = 3, **fields):
    window = LIMIT if kind == "dynamic" else 512
    settings = {"max_position_embeddings": window, "rope_parameters": dict(KINDS[kind])}
    return tiny(LlamaConfig, seed, device, **{**settings, **fields})


def assert_same(model, ids, *, plain=None, **options):
    """Compare with a copy of the model, or with `plain`, which has seen the same calls."""
    plain = copy.deepcopy(model) if plain is None else plain
    expected = greedy(plain, ids, **options)
    got = greedy(model, ids, **options)
    assert torch.equal(got, expected)
    assert torch_paged.explain(model).last_call.path == "fused"
    return expected


@pytest.mark.parametrize("length", [20, 50, 90])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind, length, device, accelerate) -> None:
    """Short of the limit, over it while decoding, past it from the start."""
    model = accelerate(llama(kind, device))
    assert_same(model, prompt(length, 3, device=device), num_tokens=30)


@pytest.mark.parametrize("lengths", [(9, 70), (5, 50, 61), (40, 66, 80)], ids=str)
@pytest.mark.parametrize("kind", CHANGING)
def test_a_padded_batch_counts_with_its_longest_row(kind, lengths, device, accelerate) -> None:
    model = accelerate(llama(kind, device))
    ids, mask = padded_prompts(lengths, device)
    together = assert_same(model, ids, attention_mask=mask, num_tokens=24)
    alone = greedy(copy.deepcopy(model), ids[:1, -lengths[0] :], num_tokens=24)
    assert not torch.equal(together[0, -24:], alone[0, -24:])


@pytest.mark.parametrize("kind", CHANGING)
def test_finished_rows_still_count(kind, device, accelerate) -> None:
    """The longest row ends early; the others go on with its length."""
    model = llama(kind, device)
    ids, mask = padded_prompts((20, 50), device)
    free = greedy(copy.deepcopy(model), ids, attention_mask=mask, num_tokens=30)
    end = free[1, 50 + 2].item()
    accelerate(model)
    options = {"attention_mask": mask, "num_tokens": 30, "eos_token_id": end}
    assert_same(model, ids, **options)


@pytest.mark.parametrize("kind", CHANGING)
def test_later_calls_follow_what_the_model_remembers(kind, device, accelerate) -> None:
    """Long, then short, then between the two: dynamic NTK stays at the longest until reset."""
    model = llama(kind, device)
    plain = copy.deepcopy(model)
    accelerate(model)
    for length, tokens in ((100, 12), (70, 8), (10, 8), (66, 6), (60, 20), (66, 5)):
        assert_same(model, prompt(length, length, device=device), plain=plain, num_tokens=tokens)


def test_calls_of_both_sides_share_what_the_model_remembers(device, accelerate) -> None:
    model = llama("dynamic", device)
    plain = copy.deepcopy(model)
    accelerate(model)
    ids = [prompt(length, length, device=device) for length in (90, 70)]
    with torch.inference_mode():
        assert_same(model, ids[0], plain=plain, num_tokens=10)
    plain.model.rotary_emb.inv_freq = plain.model.rotary_emb.inv_freq.clone()
    # Hugging Face's own forward, after our call and before the next.
    ours, theirs = model(ids[1]).logits, plain(ids[1]).logits
    ours.sum().backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        model(prompt(120, 1, device=device))
        plain(prompt(120, 1, device=device))
    assert_same(model, ids[1], plain=plain, num_tokens=10)
    assert int(model.model.rotary_emb.max_seq_len_cached) == 120


@pytest.mark.parametrize("kind", CHANGING)
def test_the_self_test_and_the_check_pass_the_limit(kind, device, accelerate) -> None:
    """Both sides from the same start, and the model as it was."""
    parameters = {**KINDS[kind]}
    if kind == "longrope":
        parameters["original_max_position_embeddings"] = 16
    fields = {"rope_parameters": parameters}
    model = llama(kind, device, **fields, **({} if kind == "longrope" else SHORT))
    plain = copy.deepcopy(model)
    compared = compare_model(model)
    assert compared.tier == "fused" and compared.agrees, str(compared)
    accelerate(model)
    for length in (17, 9):
        assert_same(model, prompt(length, 3, device=device), plain=plain, num_tokens=6)


@pytest.mark.parametrize("kind", CHANGING)
def test_sampling_beams_and_returned_scores(kind, device, accelerate) -> None:
    model = accelerate(llama(kind, device))
    ids, mask = padded_prompts((30, 58), device)
    calls = [
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": False, "output_logits": True, "return_dict_in_generate": True},
    ]
    for call in calls:
        results = []
        for side in (copy.deepcopy(model), model):
            torch.manual_seed(0)
            arguments = {"attention_mask": mask, "max_new_tokens": 16, **call}
            out = side.generate(input_ids=ids, **arguments)
            results.append(out if isinstance(out, torch.Tensor) else out.sequences)
        assert torch.equal(*results)
        assert torch_paged.explain(model).last_call.path == "fused"


@pytest.mark.parametrize("kind", CHANGING)
def test_a_cache_passed_in_keeps_the_keys_that_it_has(kind, device, accelerate) -> None:
    from models import CACHE_NAME

    model = llama(kind, device)
    plain = copy.deepcopy(model)
    accelerate(model)
    found = []
    for side in (plain, model):
        first = side.generate(
            prompt(40, 3, device=device),
            max_new_tokens=10,
            do_sample=False,
            return_dict_in_generate=True,
        )
        more = torch.cat([first.sequences, prompt(20, 5, device=device)], dim=1)
        named = {CACHE_NAME: first[CACHE_NAME]}
        found.append(side.generate(more, max_new_tokens=12, do_sample=False, **named))
    assert torch.equal(*found)
    assert torch_paged.explain(model).last_call.path == "fused"


@pytest.mark.parametrize("kind", CHANGING)
def test_an_engine_serves_each_request_as_if_alone(kind, device, accelerate) -> None:
    model = llama(kind, device)
    prompts = [prompt(length, length, device=device) for length in (40, 58, 75)]
    expected = [greedy(copy.deepcopy(model), ids, num_tokens=20)[0, -20:] for ids in prompts]
    options = {"enable_prefix_caching": True, "max_num_batched_tokens": 32, "max_model_len": 256}
    with torch_paged.Engine(model, **options) as engine:
        names = [engine.add_request(ids[0].tolist(), max_new_tokens=20) for ids in prompts]
        found = engine.run()
        for name, tokens in zip(names, expected, strict=True):
            assert list(found[name].token_ids) == tokens.tolist()
        # The first blocks of a longer prompt are those of a shorter one in tokens alone.
        longer = torch.cat([prompts[0], prompt(60, 9, device=device)], dim=1)
        tokens = greedy(copy.deepcopy(model), longer, num_tokens=20)[0, -20:]
        name = engine.add_request(longer[0].tolist(), max_new_tokens=20)
        assert list(engine.run()[name].token_ids) == tokens.tolist()


@pytest.mark.parametrize("space", [0.0, 0.1], ids=["computed again", "swapped"])
@pytest.mark.parametrize("kind", CHANGING)
def test_a_preempted_request_goes_on_as_it_was(kind, space, device) -> None:
    parameters = dict(KINDS[kind])
    for name in ("short_factor", "long_factor"):
        if name in parameters:
            parameters[name] = [factor for factor in parameters[name] for _ in range(4)]
    sizes = {"head_dim": 64, "num_key_value_heads": 4, "rope_parameters": parameters}
    model = llama(kind, device, **sizes)
    prompts = [prompt(length, length, device=device) for length in (12, 14, 17, 20)]
    expected = [greedy(copy.deepcopy(model), ids, num_tokens=60)[0, -60:] for ids in prompts]
    # 10 blocks, too few for all four to their ends.
    options = {"kv_cache_memory": 1 << 20, "max_num_seqs": 4, "max_model_len": 256}
    with torch_paged.Engine(model, cpu_offload_space=space, **options) as engine:
        names = [engine.add_request(ids[0].tolist(), max_new_tokens=60) for ids in prompts]
        found = engine.run()
        for name, tokens in zip(names, expected, strict=True):
            assert list(found[name].token_ids) == tokens.tolist()
        assert engine.num_preemptions > 0
        assert (torch_paged.stats(model).swaps > 0) == (space > 0)


PHI3 = {"max_position_embeddings": 512, "original_max_position_embeddings": LIMIT}


@pytest.mark.parametrize("length", [20, 70])
def test_phi3_on_either_side_of_its_limit(length, device, accelerate) -> None:
    model = tiny(Phi3Config, 3, device, **PHI3, rope_parameters=long())
    assert_same(accelerate(model), prompt(length, 3, device=device), num_tokens=30)


def test_phi3_computes_anew_on_its_way_past_the_limit(device, accelerate) -> None:
    model = tiny(Phi3Config, 3, device, **PHI3, rope_parameters=long())
    accelerate(model, on_unsupported="fallback")
    ids = prompt(50, 3, device=device)
    expected = greedy(copy.deepcopy(model), ids, num_tokens=30)
    assert torch.equal(greedy(model, ids, num_tokens=30), expected)
    assert torch_paged.explain(model).last_call.path == "eager"
    assert_same(model, ids, num_tokens=15)
    with torch_paged.Engine(model) as engine:
        name = engine.add_request(ids[0].tolist(), max_new_tokens=15)
        assert list(engine.run()[name].token_ids) == expected[0, 50:65].tolist()
        with pytest.raises(NotImplementedError, match="smaller max_new_tokens"):
            engine.add_request(ids[0].tolist(), max_new_tokens=30)


FORMS = [
    pytest.param(GlmConfig, {"head_dim": 16, "rope_parameters": 0.5}, id="partial-interleaved"),
    pytest.param(PhiConfig, {"num_key_value_heads": 4, "rope_parameters": 0.5}, id="partial"),
    pytest.param(CohereConfig, {"rope_parameters": 1.0}, id="interleaved"),
    pytest.param(Ernie4_5Config, {"head_dim": 16, "rope_parameters": 1.0}, id="interleaved-pairs"),
    pytest.param(SmolLM3Config, {"no_rope_layers": [1, 0, 1], "rope_parameters": 1.0}, id="some"),
    pytest.param(Qwen2Config, {"rope_parameters": 1.0}, id="qwen2"),
    pytest.param(
        GPTNeoXConfig, {"num_key_value_heads": DROP, "rope_parameters": 0.25}, id="per-head-qkv"
    ),
]


@pytest.mark.parametrize("kind", CHANGING)
@pytest.mark.parametrize(("config_class", "fields"), FORMS)
def test_changing_frequencies_in_every_form(
    config_class, fields, kind, device, accelerate
) -> None:
    share = fields["rope_parameters"]
    half = int(HALF * share)
    parameters = {**KINDS[kind], "partial_rotary_factor": share}
    for name in ("short_factor", "long_factor"):
        if name in parameters:
            parameters[name] = parameters[name][:half]
    window = LIMIT if kind == "dynamic" else 512
    settings = {**fields, "max_position_embeddings": window, "rope_parameters": parameters}
    model = accelerate(tiny(config_class, 4, device, **settings))
    ids, mask = padded_prompts((20, 55), device)
    assert_same(model, ids, attention_mask=mask, num_tokens=20)


def goes_past_its_limit(model) -> bool:
    """Say whether Hugging Face's module lives through it: longrope by layer, in 5.17, does not."""
    positions = torch.full((1, 1), 2 * LIMIT, device=model.device)
    try:
        for _ in range(2):
            model.model.rotary_emb(model.lm_head.weight, positions, "full_attention")
    except UnboundLocalError:
        return False
    return True


@pytest.mark.parametrize("kind", CHANGING)
def test_a_kind_of_layer_with_changing_frequencies(kind, device, accelerate) -> None:
    parameters = {
        "full_attention": dict(KINDS[kind]),
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    }
    model = tiny(
        Gemma3TextConfig,
        4,
        device,
        head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=LIMIT if kind == "dynamic" else 512,
        rope_parameters=parameters,
    )
    plain = copy.deepcopy(model)
    accelerate(model)
    lengths = (30, 55) if goes_past_its_limit(copy.deepcopy(model)) else (30,)
    for length in lengths:
        ids, mask = padded_prompts((20, length), device)
        assert_same(model, ids, plain=plain, attention_mask=mask, num_tokens=20)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"output_scores": True, "return_dict_in_generate": True}],
    ids=["device", "beams", "stepped"],
)
def test_the_length_that_is_remembered_is_that_of_the_last_forward(
    options: dict[str, object], device, accelerate
) -> None:
    plain = tiny(LlamaConfig, 4, device, rope_parameters=DYNAMIC, max_position_embeddings=24)
    fast = accelerate(copy.deepcopy(plain))
    for tokens in (12, 1):
        for model in (plain, fast):
            greedy(model, prompt(20, 6, device=device), num_tokens=tokens, **options)
        memories = [int(m.model.rotary_emb.max_seq_len_cached) for m in (plain, fast)]
        assert memories[0] == memories[1]
