"""Log-probabilities of generate() on the GPU: right, captured, and nothing waits for them."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torch_paged
from torch_paged.engine.batch import BatchRun

VOCAB = 4099


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    torch_paged.accelerate(model, on_unsupported="raise")
    yield model
    torch_paged.restore(model)


def generate(model, ids, seed=0, **options):
    torch.manual_seed(seed)
    options = {"max_new_tokens": 50, "do_sample": True, "top_k": 0, **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


OPTIONS = [
    {"do_sample": False},
    {"temperature": 0.7},
    {"temperature": 1.2, "top_p": 0.8, "top_k": 300},
    {"repetition_penalty": 1.3, "min_p": 0.02},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "temperature", "filters", "penalty"])
@pytest.mark.parametrize("rows", [1, 5])
def test_captured_values_are_those_of_the_outputs(rows, options, model):
    ids = torch.randint(3, VOCAB, (rows, 30), device="cuda")
    plain = generate(model, ids, **options)
    state = torch.cuda.get_rng_state()
    recorded = []
    with torch_paged.recorded_logprobs(model) as record:
        for _ in range(2):  # captured, then replayed
            assert torch.equal(generate(model, ids, **options), plain)
            assert torch.equal(torch.cuda.get_rng_state(), state)
            recorded.append(torch.stack([record.raw, record.processed, record.kept]))
            assert torch_paged.explain(model).last_call.loop == "device"
    assert torch.equal(recorded[0], recorded[1])
    output = generate(
        model,
        ids,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **options,
    )
    same = int((output.sequences == plain).all(0).long().cumprod(0).sum()) - 30
    assert same >= 10
    tokens = plain[:, 30 : 30 + same, None]
    for values, steps in ((recorded[0][0], output.logits), (recorded[0][1], output.scores)):
        wanted = torch.stack(steps[:same], 1).float().log_softmax(-1).gather(-1, tokens)[..., 0]
        torch.testing.assert_close(values[:, :same], wanted, rtol=1e-3, atol=1e-2)
    kept = recorded[0][2]
    assert ((kept > 0) & (kept < 1.001)).all()
    assert bool((kept < 0.95).any()) == ("top_p" in options or "min_p" in options)


def test_the_loop_never_syncs(model, monkeypatch):
    ids = torch.randint(3, VOCAB, (3, 30), device="cuda")
    steps = []
    run = BatchRun.run

    def watched(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps.append(run(*args))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return steps[-1]

    with torch_paged.recorded_logprobs(model) as record:
        generate(model, ids, top_p=0.9)
        monkeypatch.setattr(BatchRun, "run", watched)
        generate(model, ids, top_p=0.9)
        assert record.raw.shape == (3, 50)
    assert steps == [50]
