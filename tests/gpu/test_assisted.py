"""Assisted decoding on the GPU: captured, right, and without waiting for a draft's tokens."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torch_paged
from torch_paged.engine.batch import PackedPrompts
from torch_paged.engine.extend import EXTEND_BUCKETS
from torch_paged.engine.row_run import RowRun
from torch_paged.engine.runner import EagerRunner
from torch_paged.generate.drafts import Drafter
from torch_paged.generate.registry import find_session

VOCAB = 4099


def build(num_layers, dtype=torch.bfloat16):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=4096,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).to("cuda", dtype).eval()
    model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = None
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def random_ids(length):
    return torch.randint(3, VOCAB, (1, length), device="cuda")


def row_logits(model, ids, sizes, *, captured):
    """Return logits of all tokens behind the first 40, extended piece by piece."""
    core = find_session(model).core
    positions = torch.arange(40, dtype=torch.int32, device="cuda")
    prompts = PackedPrompts((40,), ids[0, :40], None, positions, positions[-1:])
    pieces, start = [], 40
    runner = core.runner

    def eager():
        runner()  # binds
        return EagerRunner(core.step, core.state)

    with torch.no_grad(), RowRun(core, prompts) as run:
        run.prefill()
        core.runner = runner if captured else eager
        try:
            for size in sizes:
                pieces.append(run.extend(ids[0, start : start + size]).clone())
                start += size
        finally:
            del core.runner
    return torch.cat(pieces)


@pytest.fixture
def model():
    model = build(4)
    torch_paged.accelerate(model, on_unsupported="raise")
    yield model
    torch_paged.restore(model)


SIZES = [1, 2, 3, 4, 5, 8, 11, 16, 1, 20, 32, 40, 64, 70]


def test_captured_extensions_equal_eager_ones_where_nothing_is_padded(model):
    ids = random_ids(40 + sum(EXTEND_BUCKETS))
    find_session(model).self_test_reason()
    eager = row_logits(model, ids, EXTEND_BUCKETS, captured=False)
    for _ in range(2):
        assert torch.equal(row_logits(model, ids, EXTEND_BUCKETS, captured=True), eager)
    graphs = find_session(model).core.graphs
    assert {("extend", 0, size) for size in EXTEND_BUCKETS} <= set(graphs.keys())


def test_logits_are_as_near_to_float32_as_hugging_faces(model):
    ids = random_ids(40 + sum(SIZES))
    find_session(model).self_test_reason()
    got = row_logits(model, ids, SIZES, captured=True).float()
    with torch.no_grad():
        theirs = model(ids).logits[0, 40:].float()
        exact = copy.deepcopy(model).float()(ids).logits[0, 40:]
    error, allowed = ((x - exact).pow(2).mean().sqrt() for x in (got, theirs))
    assert error <= 1.25 * allowed
    assert (got - exact).abs().max() <= 2 * (theirs - exact).abs().max()


def test_extension_behind_a_long_context(model):
    ids = random_ids(3000)
    find_session(model).self_test_reason()
    sizes = [64] * 46 + [5, 3, 8]
    got = row_logits(model, ids, sizes, captured=True).float()
    with torch.no_grad():
        theirs = model(ids[:, : 40 + sum(sizes)]).logits[0, 40:].float()
        exact = copy.deepcopy(model).float()(ids[:, : 40 + sum(sizes)]).logits[0, 40:]
    error, allowed = ((x[-16:] - exact[-16:]).pow(2).mean().sqrt() for x in (got, theirs))
    assert error <= 1.25 * allowed


def test_candidates_change_no_token():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    model, assistant = build(4, torch.float32), build(3, torch.float32)
    ids = random_ids(30).repeat(1, 2)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 64, "do_sample": False}
    try:
        expected = model.generate(ids, **options)
        for each in (model, assistant):
            torch_paged.accelerate(each, on_unsupported="raise")
        for _ in range(2):
            assert torch.equal(
                model.generate(ids, prompt_lookup_num_tokens=5, **options), expected
            )
            assert torch.equal(model.generate(ids, assistant_model=assistant, **options), expected)
        assert torch_paged.explain(assistant).last_call.loop == "device"
        assert not torch_paged.stats(model).not_captured
        assert not torch_paged.stats(assistant).not_captured
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def generate(model, ids, **options):
    options = {"max_new_tokens": 40, "do_sample": False, **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


@pytest.fixture
def pair():
    """A model and an assistant that agree: their layers leave the last token's state alone."""
    model, assistant = build(24, torch.float32), build(2, torch.float32)
    assistant.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for layer in (*model.model.layers, *assistant.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    for each in (model, assistant):
        torch_paged.accelerate(each, on_unsupported="raise")
    yield model, assistant
    for each in (model, assistant):
        torch_paged.restore(each)


def test_graphs_are_captured_once_over_many_calls(pair):
    model, assistant = pair
    counts = []
    for _ in range(3):
        for seed in range(3):
            torch.manual_seed(seed)
            generate(model, random_ids(50), assistant_model=assistant, do_sample=True)
        counts.append([torch_paged.stats(each).graphs for each in pair])
    # A prompt's bucket is captured when it is met for the second time.
    assert counts[1] == counts[2] and min(counts[0]) >= 3
    assert all(torch_paged.stats(each).recaptures == 0 for each in pair)


def test_drafts_that_agree_are_kept(pair):
    model, assistant = pair
    ids = random_ids(50)
    plain = generate(model, ids, max_new_tokens=200)
    before = torch_paged.stats(model).steps
    assert torch.equal(generate(model, ids, max_new_tokens=200, assistant_model=assistant), plain)
    # Four candidates and one more in each round, and a step for the candidates of the first.
    assert torch_paged.stats(model).steps - before <= 200 / 5 + 2


def test_drafts_run_ahead_without_a_sync(pair, monkeypatch):
    model, assistant = pair
    ids, rounds = random_ids(50), []
    expected = generate(model, ids, assistant_model=assistant)
    ahead = Drafter._draft_ahead

    def watched(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            rounds.append(ahead(*args))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return rounds[-1]

    monkeypatch.setattr(Drafter, "_draft_ahead", watched)
    assert torch.equal(generate(model, ids, assistant_model=assistant), expected)
    assert len(rounds) >= 8
