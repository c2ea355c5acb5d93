"""The decode loop on the GPU: captured, without syncs, without Hugging Face's forward."""

import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torch_paged
from tests.gpu.teacher import our_logits
from torch_paged.engine.batch import BatchLimits, BatchRun, PackedPrompts
from torch_paged.engine.sampler import GreedySampler
from torch_paged.generate.registry import find_session


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=4099,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return torch_paged.accelerate(model, on_unsupported="raise")


def generate(model, ids, new, **kwargs):
    kwargs.setdefault("do_sample", False)
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **kwargs)


def random_ids(rows, length):
    return torch.randint(3, 4099, (rows, length), device="cuda")


@pytest.mark.parametrize("rows", [1, 3, 8, 32, 70])
def test_replay_equals_the_eager_step_bit_for_bit(model, rows):
    ids = random_ids(rows, 60)
    generate(model, ids, 2)
    captured = our_logits(model, ids, 29)
    eager = our_logits(model, ids, 29, captured=False)
    assert torch.equal(captured, eager)
    assert torch_paged.stats(model).graphs > 0


def test_captured_short_then_run_long(model):
    short = generate(model, random_ids(1, 17), 4)
    assert short.shape == (1, 21)
    ids = random_ids(1, 1500)
    captured = our_logits(model, ids, 1400)
    eager = our_logits(model, ids, 1400, captured=False)
    assert torch.equal(captured, eager)


def test_no_hugging_face_forward_while_decoding(model):
    ids = random_ids(2, 20)
    expected = generate(model, ids, 20)

    def refuse(*args, **kwargs):
        raise AssertionError("Hugging Face's forward ran")

    classes = {type(m) for m in model.modules() if "Attention" in type(m).__name__}
    classes |= {type(layer) for layer in model.model.layers} | {type(model.model)}
    saved = {cls: cls.forward for cls in classes}
    try:
        for cls in classes:
            cls.forward = refuse
        assert torch.equal(generate(model, ids, 20), expected)
    finally:
        for cls, forward in saved.items():
            cls.forward = forward


def start_run(model, rows, new, lag):
    core = find_session(model).core
    ids = random_ids(rows, 20)
    positions = torch.arange(20, dtype=torch.int32, device="cuda")
    prompts = PackedPrompts(
        (20,) * rows, ids.reshape(-1), None, positions.repeat(rows), positions[-1:].expand(rows)
    )
    return BatchRun(core, prompts, BatchLimits(new, eos_ids=(1,), pad_token=0), lag)


def test_the_loop_never_syncs(model):
    generate(model, random_ids(4, 20), 100)  # captures, pool
    with torch.no_grad(), start_run(model, 4, 100, lag=4) as run:
        logits = run.prefill()
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps = run.run(logits, GreedySampler())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert 1 <= steps <= 100


def test_steps_queue_behind_a_busy_gpu(model):
    generate(model, random_ids(1, 20), 40)
    with torch.no_grad(), start_run(model, 1, 40, lag=0) as run:
        sampler = GreedySampler()
        run.first_tokens(run.prefill(), sampler)
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        torch.cuda._sleep(2_000_000_000)  # about a second
        started = time.perf_counter()
        for _ in range(8):
            run.launch(sampler)
        launched = time.perf_counter() - started
        done.record()
        assert not done.query(), "the GPU was idle: the test shows nothing"
        assert launched < 0.5
        torch.cuda.synchronize()


def test_a_step_allocates_nothing(model):
    generate(model, random_ids(2, 20), 80)
    with torch.no_grad(), start_run(model, 2, 60, lag=0) as run:
        sampler = GreedySampler()
        run.first_tokens(run.prefill(), sampler)
        run.launch(sampler)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(20):
            run.launch(sampler)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_sampling_draws_as_hugging_face_and_leaves_the_generator_there(model):
    torch_paged.restore(model)
    model.float()
    model.set_attn_implementation("eager")
    ids = random_ids(3, 20)
    kwargs = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9}
    torch.manual_seed(7)
    expected = generate(model, ids, 30, **kwargs)
    state = torch.cuda.get_rng_state()
    torch_paged.accelerate(model, on_unsupported="raise")
    for _ in range(2):  # captured, then replayed
        torch.manual_seed(7)
        got = generate(model, ids, 30, **kwargs)
        same = (got == expected).all(0).long().cumprod(0).sum()
        assert same >= 20 + 10
        assert torch.equal(torch.cuda.get_rng_state(), state)


def test_generator_is_rewound_past_an_early_end(model):
    ids = random_ids(1, 20)
    torch.manual_seed(3)
    free = generate(model, ids, 40, do_sample=True, top_k=0)
    end = int(free[0, 20 + 9])
    first = int((free[0, 20:] == end).nonzero()[0])
    torch.manual_seed(3)
    for _ in range(first + 1):
        torch.multinomial(torch.ones(1, 4099, device="cuda"), 1)
    expected = torch.cuda.get_rng_state()
    torch.manual_seed(3)
    got = generate(model, ids, 40, do_sample=True, top_k=0, eos_token_id=end)
    assert torch.equal(got[0], free[0, : 20 + first + 1])
    assert torch.equal(torch.cuda.get_rng_state(), expected)
