"""Autograd modes, defaults of torch, threads and forks around generate()."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import greedy, padded_prompts, prompt, reference, seeded, tiny, tiny_family
from transformers import LlamaConfig

import torch_paged

MODES = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
    "plain": contextlib.nullcontext,
}


@pytest.fixture
def model(device):
    return tiny(LlamaConfig, 9, device)


@pytest.mark.parametrize("first", MODES)
def test_autograd_modes_in_turn(first, model, device, accelerate) -> None:
    prompts = [prompt(n, n, device=device) for n in (5, 17, 40)]
    expected = [reference(model, ids, 12).sequences for ids in prompts]
    with MODES[first]():
        accelerate(model)
        assert torch.equal(greedy(model, prompts[0], 12), expected[0])
    for mode in (*MODES, "inference", "plain"):
        with MODES[mode]():
            for ids, sequences in zip(prompts, expected, strict=True):
                assert torch.equal(greedy(model, ids, 12), sequences), mode


def test_inference_mode_in_another_thread(model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)
    expected = reference(model, ids).sequences
    accelerate(model)
    results = []

    def generate() -> None:
        with torch.inference_mode():
            results.append(greedy(model, ids))

    for _ in range(2):
        thread = threading.Thread(target=generate)
        thread.start()
        thread.join(120)
        results.append(greedy(model, ids))
    assert len(results) == 4
    assert all(torch.equal(result, expected) for result in results)


def test_outputs_can_be_used_in_autograd(model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)
    with torch.inference_mode():
        accelerate(model)
        greedy(model, ids, 4)
    output = greedy(model, ids, 4, return_dict_in_generate=True, output_logits=True)
    loss = model(output.sequences, labels=output.sequences).loss
    weight = torch.ones(257, device=device, requires_grad=True)
    (loss + (output.logits[0] * weight).sum()).backward()
    assert torch.equal(weight.grad, output.logits[0][0])
    assert not output.logits[0].requires_grad and not output.sequences.is_inference()
    output.sequences.add_(0)


def test_threads_on_one_model(model, device, accelerate) -> None:
    cases = [padded_prompts(lengths, device) for lengths in ((3,), (5, 17), (33,), (8, 9, 30))]
    expected = [reference(model, ids, 10, attention_mask=mask).sequences for ids, mask in cases]
    accelerate(model)

    def generate(worker: int) -> list[torch.Tensor]:
        ids, mask = cases[worker]
        return [greedy(model, ids, 10, attention_mask=mask) for _ in range(6)]

    with ThreadPoolExecutor(4) as pool:
        for got, sequences in zip(pool.map(generate, range(4)), expected, strict=True):
            assert all(torch.equal(result, sequences) for result in got)
    assert torch_paged.stats(model).kv_blocks_used == 0


def test_threads_on_two_models(model, device, accelerate) -> None:
    other = tiny_family("qwen3", device)
    ids = prompt(17, 17, device=device)
    models = [model, other]
    expected = [reference(m, ids, 16).sequences for m in models]
    for m in models:
        accelerate(m)
    with ThreadPoolExecutor(2) as pool:
        runs = pool.map(lambda m: [greedy(m, ids, 16) for _ in range(6)], models)
        for got, sequences in zip(runs, expected, strict=True):
            assert all(torch.equal(result, sequences) for result in got)


def _generate_in_child(model, ids, connection) -> None:
    torch.set_num_threads(1)
    try:
        connection.send(greedy(model, ids, 8).tolist())
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this platform"
)
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_fork_gives_the_tokens_or_a_clear_error(model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)
    expected = reference(model, ids, 8).sequences
    accelerate(model)
    greedy(model, ids, 8)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_generate_in_child, args=(model, ids, sender))
    child.start()
    try:
        assert receiver.poll(90), "the forked process hangs"
        answer = receiver.recv()
    finally:
        child.kill()
        child.join(10)
    # On a GPU, CUDA refuses the first tensor that generate() itself makes.
    refusals = ("fork", "cuda error: initialization error")
    told = str(answer).lower()
    assert answer == expected.tolist() or any(refusal in told for refusal in refusals), answer
    assert torch.equal(greedy(model, ids, 8), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_default_dtype(dtype, model, device, accelerate) -> None:
    ids, mask = padded_prompts((5, 17), device)
    untouched = copy.deepcopy(model)
    options = {"attention_mask": mask, "max_new_tokens": 16, "top_p": 0.9}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        expected = greedy(untouched, ids, attention_mask=mask)
        sampled = seeded(untouched, 2, ids, **options)
        accelerate(model, on_unsupported="fallback")
        got = greedy(model, ids, attention_mask=mask)
        got_sampled = seeded(model, 2, ids, **options)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(got, expected)
    assert torch.equal(got_sampled.result, sampled.result)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_default_dtype_makes_no_tensor_of_ours(dtype, model, device, accelerate) -> None:
    ids, _ = padded_prompts((5, 5), device)
    forced = {"forced_eos_token_id": 3, "sequence_bias": [[[4], 2.0], [[6, 7], -3.0]]}
    expected = greedy(model, ids, 6, **forced)
    accelerate(model)

    def served() -> tuple[list[list[float]], list[list[float]]]:
        with torch_paged.Engine(model) as engine:
            for row in ids.tolist():
                engine.add_request(row, max_new_tokens=4, logprobs=3, prompt_logprobs=2)
            outputs = list(engine.run().values())
        assert [out.error for out in outputs] == [None, None]
        return [out.logprobs for out in outputs], [out.prompt_logprobs[1:] for out in outputs]

    found = served()
    torch_paged.restore(model)
    accelerate(model)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert served() == found
        assert torch.equal(greedy(model, ids, 6, **forced), expected)
        with torch_paged.recorded_logprobs(model) as recorded:
            greedy(model, ids, 4)
        assert recorded.raw.dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_an_engine_made_under_autocast_leaves_the_model_accelerated(
    model, device, accelerate
) -> None:
    ids, _ = padded_prompts((5, 5), device)
    expected = greedy(model, ids, 6)
    accelerate(model)
    with torch.autocast(device.type, torch.bfloat16):
        torch_paged.Engine(model).close()
    assert torch_paged.explain(model).tier == "fused"
    assert torch.equal(greedy(model, ids, 6), expected)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"top_p": 0.9}], ids=str)
def test_default_device(options, model, device, accelerate) -> None:
    """On `meta`, whatever is made without a device shows."""
    ids, mask = padded_prompts((5, 17), device)
    arguments = {"attention_mask": mask, "max_new_tokens": 16, **options}
    expected = seeded(copy.deepcopy(model), 2, ids, **arguments)
    for default in (device, "meta"):
        accelerate(model)
        with torch.device(default):
            got = seeded(model, 2, ids, **arguments)
            with torch_paged.Engine(model) as engine:
                name = engine.add_request(ids[1].tolist(), max_new_tokens=8, do_sample=False)
                served = engine.run()[name]
        assert torch.equal(got.result, expected.result)
        if not options.get("do_sample", True):
            assert list(served.token_ids) == expected.result[1, 17:25].tolist()


@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
def test_deterministic_algorithms(model, device, accelerate) -> None:
    """The flag also fills uninitialised memory with NaN, which must not reach a token."""
    ids, mask = padded_prompts((1, 5, 17, 33), device)
    expected = reference(model, ids, attention_mask=mask).sequences
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        accelerate(model)
        assert torch.equal(greedy(model, ids, attention_mask=mask), expected)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", ["strided", "int32", "expanded"])
def test_kinds_of_ids(kind, model, device, accelerate) -> None:
    ids = prompt(17, 17, device=device)
    batch = {
        "strided": ids.repeat_interleave(2, 1)[:, ::2],
        "int32": ids.int(),
        "expanded": ids.expand(3, 17),
    }[kind]
    expected = greedy(copy.deepcopy(model), batch)
    accelerate(model, on_unsupported="fallback")
    got = greedy(model, batch)
    assert torch.equal(got, expected) and got.dtype is expected.dtype


def test_a_forward_under_autocast_is_left_to_hugging_face(model, device, accelerate) -> None:
    """As a trainer prepares a float32 model for bfloat16: autocast is inside the forward."""
    ids = prompt(17, 17, device=device)
    model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    accelerate(model, on_unsupported="fallback")
    assert torch.equal(greedy(model, ids, 12), expected)
    report = torch_paged.explain(model)
    assert report.tier == "eager", str(report)
    assert any("self-test: a step raised" in reason for reason in report.reasons), report.reasons
