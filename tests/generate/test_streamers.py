"""Streamers get Hugging Face's tokens in its order, never one past the stop."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from models import (
    byte_tokenizer,
    greedy,
    left_pad,
    padded_prompts,
    prompt,
    reference,
    seeded,
    tape_model,
    tiny,
)
from transformers import LlamaConfig, LogitsProcessor, TextIteratorStreamer, TextStreamer

import torch_paged

LAGS = [0, 1, 4]


class Recorder:
    """Keeps what put() and end() were called with."""

    def __init__(self) -> None:
        self.puts: list[torch.Tensor] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ends, "put() after end()"
        self.puts.append(value.clone())

    def end(self) -> None:
        self.ends += 1


class Interruption(Exception):
    pass


class RaisingRecorder(Recorder):
    """Raises when it is given its n-th value, the prompt being the first."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.at, self.error = at, error

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.puts) == self.at:
            raise self.error


def assert_same_stream(got: Recorder, expected: Recorder) -> None:
    assert [tuple(value.shape) for value in got.puts] == [tuple(v.shape) for v in expected.puts]
    for value, wanted in zip(got.puts, expected.puts, strict=True):
        assert value.device == wanted.device and value.dtype == wanted.dtype
        assert torch.equal(value, wanted)
    assert got.ends == expected.ends == 1


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("num_tokens", [1, 3, 20])
def test_batch_is_streamed_as_before(num_tokens, lag, device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device)
    ids, mask = padded_prompts((3, 17), device)
    expected, got = Recorder(), Recorder()
    tokens = greedy(copy.deepcopy(model), ids, num_tokens, attention_mask=mask, streamer=expected)
    assert len(expected.puts) == num_tokens + 1
    accelerate(model, lag=lag)
    output = greedy(model, ids, num_tokens, attention_mask=mask, streamer=got)
    assert torch.equal(output, tokens)
    assert_same_stream(got, expected)
    call = torch_paged.explain(model).last_call
    assert (call.path, call.loop) == ("fused", "lagged")


@pytest.mark.parametrize("lag", LAGS)
def test_nothing_is_streamed_past_the_stop(lag, device, accelerate) -> None:
    model = tiny(LlamaConfig, 14, device)
    batch, mask = left_pad([prompt(5, 5, device=device), prompt(17, 17, device=device)])
    free = reference(model, batch, attention_mask=mask).sequences[:, 17:]
    options = {"attention_mask": mask, "eos_token_id": [int(free[0, 8]), int(free[1, 4])]}
    expected, got = Recorder(), Recorder()
    tokens = greedy(copy.deepcopy(model), batch, streamer=expected, **options)
    assert tokens.shape[1] < 17 + 24
    accelerate(model, lag=lag)
    assert torch.equal(greedy(model, batch, streamer=got, **options), tokens)
    assert_same_stream(got, expected)


@pytest.mark.parametrize("lag", [0, 4])
def test_sampling_is_streamed_and_leaves_the_generator(lag, device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device, initializer_range=0.15)
    ids, mask = padded_prompts((3, 17), device)
    options = {"attention_mask": mask, "max_new_tokens": 40, "top_k": 0}
    options["eos_token_id"] = list(range(3, 40))
    expected_stream, stream = Recorder(), Recorder()
    expected = seeded(copy.deepcopy(model), 8, ids, streamer=expected_stream, **options)
    accelerate(model, lag=lag)
    got = seeded(model, 8, ids, streamer=stream, **options)
    assert torch.equal(got.result, expected.result)
    assert torch.equal(got.states[-1], expected.states[-1])
    assert_same_stream(stream, expected_stream)


def test_streamed_values_are_not_overwritten(device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device)
    ids = prompt(17, 17, device=device)
    kept: list[torch.Tensor] = []

    class Keeper(Recorder):
        def put(self, value: torch.Tensor) -> None:
            kept.append(value)

    accelerate(model)
    tokens = greedy(model, ids, 30, streamer=Keeper())
    assert torch.equal(torch.cat([kept[0][0], *kept[1:]]), tokens[0].cpu())


def test_text_streamer_prints_the_text(device, accelerate, capsys) -> None:
    tokenizer = byte_tokenizer()
    model = tape_model(tokenizer.encode("CDEFGHIJKLMN", add_special_tokens=False), device)
    ids = tokenizer("alphabet: ABC", return_tensors="pt").input_ids.to(device)
    accelerate(model)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    greedy(model, ids, 20, streamer=streamer)
    assert capsys.readouterr().out == "DEFGHIJKLMN\n"


def test_refusals_stay_refusals(device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device)
    ids, mask = padded_prompts((3, 17), device)
    expected = reference(model, ids, 3, attention_mask=mask).sequences
    streamer = TextStreamer(byte_tokenizer())
    for m in (copy.deepcopy(model), accelerate(model, on_unsupported="fallback")):
        with pytest.raises(ValueError, match="batch size 1"):
            greedy(m, ids, 3, attention_mask=mask, streamer=streamer)
        with pytest.raises(ValueError, match="streamer"):
            greedy(m, ids[1:], 3, streamer=streamer, num_beams=2)
    assert torch.equal(greedy(model, ids, 3, attention_mask=mask), expected)


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("at", [1, 2, 5, 25])
def test_exception_in_put_surfaces_and_leaves_the_model_usable(
    at, lag, device, accelerate
) -> None:
    model = tiny(LlamaConfig, 3, device)
    ids = prompt(17, 17, device=device)
    expected = reference(model, ids, 24).sequences
    accelerate(model, lag=lag)
    streamer = RaisingRecorder(at, Interruption("enough"))
    with pytest.raises(Interruption, match="enough"):
        greedy(model, ids, 24, streamer=streamer)
    assert len(streamer.puts) == at
    assert torch.equal(greedy(model, ids, 24), expected)
    assert torch_paged.stats(model).kv_blocks_used == 0


def test_keyboard_interrupt_leaves_the_model_usable(device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device)
    ids = prompt(17, 17, device=device)
    expected = reference(model, ids, 24).sequences
    accelerate(model)
    with pytest.raises(KeyboardInterrupt):
        greedy(model, ids, 24, streamer=RaisingRecorder(6, KeyboardInterrupt()))
    assert torch.equal(greedy(model, ids, 24), expected)
    assert torch_paged.stats(model).kv_blocks_used == 0


def test_iterator_streamer_in_a_thread(device, accelerate) -> None:
    tokenizer = byte_tokenizer()
    model = tape_model(tokenizer.encode("CDEFGHIJKLMN", add_special_tokens=False), device)
    ids = tokenizer("alphabet: ABC", return_tensors="pt").input_ids.to(device)
    accelerate(model)
    for _ in range(3):
        streamer = TextIteratorStreamer(
            tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60
        )
        thread = threading.Thread(
            target=greedy, args=(model, ids, 20), kwargs={"streamer": streamer}
        )
        thread.start()
        text = "".join(streamer)
        thread.join(60)
        assert text == "DEFGHIJKLMN"
    assert torch_paged.explain(model).last_call.loop == "lagged"


class RaiseAtStep(LogitsProcessor):
    def __init__(self, step: int) -> None:
        self.step, self.calls = step, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == self.step:
            raise Interruption("in a processor")
        return scores


def test_failing_processor_reaches_the_generating_thread(device, accelerate) -> None:
    tokenizer = byte_tokenizer()
    model = tape_model(tokenizer.encode("CDEFGHIJKLMN", add_special_tokens=False), device)
    ids = tokenizer("alphabet: ABC", return_tensors="pt").input_ids.to(device)
    expected = greedy(copy.deepcopy(model), ids, 20)
    accelerate(model)
    errors: list[BaseException] = []
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)

    def generate() -> None:
        try:
            greedy(model, ids, 20, streamer=streamer, logits_processor=[RaiseAtStep(3)])
        except Interruption as error:
            errors.append(error)
            streamer.end()

    thread = threading.Thread(target=generate)
    thread.start()
    text = "".join(streamer)
    thread.join(60)
    assert len(errors) == 1
    assert "DEFGHI".startswith(text) and text
    assert torch.equal(greedy(model, ids, 20), expected)


def test_streamer_that_generates_with_the_same_model(device, accelerate) -> None:
    model = tiny(LlamaConfig, 3, device)
    ids, other = prompt(17, 17, device=device), prompt(5, 5, device=device)
    expected = reference(model, ids, 12).sequences
    expected_other = reference(model, other, 6).sequences
    accelerate(model)
    inner: list[torch.Tensor] = []

    class Nested(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.puts) == 4:
                inner.append(greedy(model, other, 6))

    assert torch.equal(greedy(model, ids, 12, streamer=Nested()), expected)
    assert torch.equal(inner[0], expected_other)


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("at", [2, 5])
def test_a_streamer_that_raises_leaves_the_generator_as_it_was(
    at, lag, device, accelerate
) -> None:
    model = tiny(LlamaConfig, 3, device)
    ids = prompt(17, 17, device=device)
    untouched = copy.deepcopy(model)
    accelerate(model, lag=lag)

    def drawn_next(target) -> torch.Tensor:
        torch.manual_seed(5)
        with pytest.raises(Interruption):
            target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                max_new_tokens=24,
                streamer=RaisingRecorder(at, Interruption("enough")),
            )
        return torch.rand(4, device=device)

    assert torch.equal(drawn_next(model), drawn_next(untouched))
