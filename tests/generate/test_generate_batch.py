"""transformers' doors of continuous batching reach the engine, and drop nothing."""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, GPT2Config, LlamaConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin

import torch_paged
from torch_paged.generate.registry import find_session

sys.path.append(str(Path(__file__).resolve().parents[1] / "engine"))

from serving_case import Answers, ids_of, small_model, tape_model, tiny  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
PROMPTS = [ids_of(n, n) for n in (5, 16, 17, 31)]
NUM_TOKENS = 14


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers(small_model())


@pytest.fixture
def model(accelerate: Any) -> Any:
    return accelerate(copy.deepcopy(small_model()))


@pytest.fixture(autouse=True)
def no_paged_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make transformers' own manager fail wherever it would start to work."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("transformers' own manager was made")

    monkeypatch.setattr(ContinuousBatchingManager, "__init__", refuse)


def config_of(model: Any, **fields: Any) -> GenerationConfig:
    config = copy.deepcopy(model.generation_config)
    config.update(**{"max_new_tokens": NUM_TOKENS, "do_sample": False, **fields})
    return config


def test_generate_batch_gives_what_generate_gives(model: Any, answers: Answers) -> None:
    training = model.training
    results = model.generate_batch(PROMPTS, generation_config=config_of(model))
    assert list(results) == ["req_0", "req_1", "req_2", "req_3"]
    for ids, (name, result) in zip(PROMPTS, results.items(), strict=True):
        assert result.generated_tokens == answers(ids, NUM_TOKENS)
        assert result.request_id == name and result.prompt_ids == ids
        assert result.is_finished() and result.error is None
    assert model.config._attn_implementation == "eager" and model.training == training
    assert torch_paged.stats(model).fallbacks == {}
    assert torch_paged.stats(model).kv_blocks_used == 0


def test_the_same_through_max_new_tokens_and_the_models_config(
    model: Any, answers: Answers
) -> None:
    results = model.generate_batch(PROMPTS, max_new_tokens=3, progress_bar=True)
    assert [r.generated_tokens for r in results.values()] == [answers(p, 3) for p in PROMPTS]
    model.generation_config.max_new_tokens = 4
    results = model.generate_batch(PROMPTS, warmup=False, record_timestamps=True)
    for ids, result in zip(PROMPTS, results.values(), strict=True):
        assert result.generated_tokens == answers(ids, 4)
        assert len(result.timestamps) == 4 and result.timestamps == sorted(result.timestamps)
    assert model.generate_batch([]) == {}


DROPPED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"min_new_tokens": 9, "eos_token_id": list(range(40))},
    {"min_length": 20, "eos_token_id": list(range(40))},
    {"bad_words_ids": [[t] for t in range(0, 64, 3)]},
    {"suppress_tokens": list(range(0, 64, 5))},
]


@pytest.mark.parametrize("kwargs", DROPPED, ids=lambda kwargs: next(iter(kwargs)))
@pytest.mark.parametrize("how", ["config", "kwargs"])
def test_what_transformers_drops_counts(
    model: Any, answers: Answers, kwargs: dict[str, Any], how: str
) -> None:
    if how == "config":
        results = model.generate_batch(PROMPTS, generation_config=config_of(model, **kwargs))
    else:
        results = model.generate_batch(PROMPTS, max_new_tokens=NUM_TOKENS, **kwargs)
    for ids, result in zip(PROMPTS, results.values(), strict=True):
        assert result.generated_tokens == answers(ids, NUM_TOKENS, pad_token_id=0, **kwargs)


def test_stop_strings_count(accelerate: Any) -> None:
    from models import byte_tokenizer

    tokenizer = byte_tokenizer()
    chain = tokenizer("abcdefghij", add_special_tokens=False).input_ids
    model = accelerate(tape_model(chain, "cpu"))
    results = model.generate_batch(
        [[1, chain[0]], [1, chain[4]]],
        max_new_tokens=20,
        stop_strings=["ef"],
        tokenizer=tokenizer,
    )
    texts = [tokenizer.decode(r.generated_tokens) for r in results.values()]
    assert texts[0] == "bcdef" and texts[1].startswith("f")


def test_further_sequences_come_back(model: Any) -> None:
    config = config_of(model, do_sample=True, num_return_sequences=3)
    results = model.generate_batch(PROMPTS[:2], generation_config=config)
    assert list(results) == [
        "req_0__child#0",
        "req_0__child#1",
        "req_0",
        "req_1__child#0",
        "req_1__child#1",
        "req_1",
    ]
    for i in range(2):
        group = [r for name, r in results.items() if name.startswith(f"req_{i}")]
        assert all(r.prompt_ids == PROMPTS[i] for r in group)
        assert len({tuple(r.generated_tokens) for r in group}) == 3


def test_a_seed_repeats_a_batch(model: Any) -> None:
    def run(**kwargs: Any) -> list[list[int]]:
        results = model.generate_batch(
            PROMPTS, max_new_tokens=8, do_sample=True, top_k=0, **kwargs
        )
        return [r.generated_tokens for r in results.values()]

    assert run(seed=3) == run(seed=3) != run(seed=4)


def test_log_probabilities_are_returned_where_asked_for(model: Any, answers: Answers) -> None:
    from transformers import ContinuousBatchingConfig

    batching = ContinuousBatchingConfig(return_logprobs=True)
    results = model.generate_batch(
        PROMPTS, generation_config=config_of(model), continuous_batching_config=batching
    )
    for ids, result in zip(PROMPTS, results.values(), strict=True):
        with torch.no_grad():
            logits = small_model()(torch.tensor([ids + result.generated_tokens])).logits[0]
        expected = logits.log_softmax(-1)[len(ids) - 1 : -1]
        expected = expected.gather(1, torch.tensor(result.generated_tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-4, rtol=0)


def test_manager_serves_requests_each_with_its_own_settings(model: Any, answers: Answers) -> None:
    with model.continuous_batching_context_manager(generation_config=config_of(model)) as manager:
        assert isinstance(manager, ContinuousBatchingManager) and manager.is_running()
        manager.add_request(PROMPTS[0], request_id="plain")
        manager.add_request(PROMPTS[1], request_id="short", max_new_tokens=2)
        manager.add_request(PROMPTS[2], request_id="penalty", repetition_penalty=1.7)
        stop = answers(PROMPTS[3], NUM_TOKENS)[5]
        manager.add_request(PROMPTS[3], request_id="stop", eos_token_id=stop)
        manager.add_request(PROMPTS[0], request_id="hot", do_sample=True, temperature=3.0, seed=1)
        results = {}
        for result in manager:
            results[result.request_id] = result
            if len(results) == 5:
                break
    assert not manager.is_running()
    assert results["plain"].generated_tokens == answers(PROMPTS[0], NUM_TOKENS)
    assert results["short"].generated_tokens == answers(PROMPTS[1], 2)
    assert results["penalty"].generated_tokens == answers(
        PROMPTS[2], NUM_TOKENS, repetition_penalty=1.7
    )
    full = answers(PROMPTS[3], NUM_TOKENS)
    assert results["stop"].generated_tokens == full[: full.index(stop) + 1]
    assert results["hot"].generated_tokens != results["plain"].generated_tokens


def test_streaming_is_cumulative_and_ends(model: Any, answers: Answers) -> None:
    manager = model.init_continuous_batching(generation_config=config_of(model))
    manager.start()
    name = manager.add_request(PROMPTS[0], streaming=True)
    seen = [r.generated_tokens for r in manager.request_id_iter(name)]
    expected = answers(PROMPTS[0], NUM_TOKENS)
    assert seen[-1] == expected and len(seen) > 3
    assert all(tokens == expected[: len(tokens)] for tokens in seen)
    manager.stop(block=True)
    manager.destroy()


def test_a_handler_hears_on_its_event_loop(model: Any, answers: Answers) -> None:
    async def main() -> list[Any]:
        manager = model.init_continuous_batching(generation_config=config_of(model))
        manager.start()
        heard: list[Any] = []
        done = asyncio.Event()

        def handler(result: Any) -> None:
            heard.append(result)
            if result.is_finished():
                done.set()

        manager.register_result_handler("one", handler)
        manager.add_request(PROMPTS[1], request_id="one", streaming=True)
        await asyncio.wait_for(done.wait(), 60)
        manager.stop(block=True)
        manager.destroy()
        return heard

    heard = asyncio.run(main())
    assert heard[-1].generated_tokens == answers(PROMPTS[1], NUM_TOKENS) and len(heard) > 3


def test_the_server_of_transformers_goes_through_the_engine(accelerate: Any) -> None:
    serving = pytest.importorskip("transformers.cli.serving.utils", exc_type=ImportError)
    from models import byte_tokenizer
    from serving_case import reference_model

    model = accelerate(copy.deepcopy(reference_model(8)))
    ids, tokenizer = ids_of(9, 9, 250), byte_tokenizer()
    expected = Answers(reference_model(8))(ids, 12)
    config = config_of(model, max_new_tokens=12)

    async def main() -> tuple[list[int], str, str]:
        server = serving.CBGenerateManager()
        server.init_cb(model, config)
        inputs = {"input_ids": ids}
        text, _, tokens = await server.generate_non_streaming(
            model, tokenizer, inputs, config, "whole"
        )
        pieces, _ = server.generate_streaming(model, tokenizer, inputs, config, "pieces")
        streamed = ""
        while (piece := await asyncio.wait_for(pieces.get(), 60)) is not None:
            streamed += piece
        server.stop()
        return tokens, text, streamed

    tokens, text, streamed = asyncio.run(main())
    assert tokens == expected and text == tokenizer.decode(expected, skip_special_tokens=True)
    # A character whose bytes have not all come is held back.
    assert streamed and text.startswith(streamed)


@pytest.mark.parametrize("streaming", [False, True])
def test_cancelled_requests_have_no_result_and_the_rest_goes_on(
    model: Any, answers: Answers, streaming: bool
) -> None:
    with model.continuous_batching_context_manager(
        generation_config=config_of(model, max_new_tokens=80)
    ) as manager:
        manager.add_request(PROMPTS[0], request_id="gone", streaming=streaming)
        manager.add_request(PROMPTS[1], request_id="stays")
        manager.cancel_request("gone")
        manager.cancel_request("never")
        results = [manager.get_result(timeout=60)]
        while results[-1].request_id != "stays":
            results.append(manager.get_result(timeout=60))
        # All that is known of the other has come before it was cancelled.
        assert not any(r.is_finished() or r.error for r in results[:-1])
        assert streaming or len(results) == 1
        assert manager.get_result(timeout=0.2) is None
        assert manager.service.is_idle
    assert results[-1].generated_tokens == answers(PROMPTS[1], 80)


def test_generate_batch_leaves_out_what_another_thread_cancels(
    model: Any,
    answers: Answers,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(model, max_new_tokens=80)
    manager = model.init_continuous_batching(generation_config=config)
    model._cached_continuous_batching_manager = manager
    submit = manager.submit_all

    def submit_all(*args: Any, **kwargs: Any) -> list[str]:
        names = submit(*args, **kwargs)
        thread = threading.Thread(target=manager.cancel_request, args=(names[1],))
        thread.start()
        thread.join()
        return names

    monkeypatch.setattr(manager, "submit_all", submit_all)
    try:
        results = model.generate_batch(
            PROMPTS[:3], generation_config=config, persistent_manager=True
        )
    finally:
        model.destroy_cached_continuous_batching_manager()
    assert list(results) == ["req_0", "req_2"]
    for name, ids in (("req_0", PROMPTS[0]), ("req_2", PROMPTS[2])):
        assert results[name].generated_tokens == answers(ids, 80)
    assert "1 requests were cancelled: req_1" in caplog.text


@pytest.mark.parametrize("caching", [False, True])
def test_rotary_models_go_on_past_the_length_that_they_were_made_for(caching: bool) -> None:
    own = tiny(LlamaConfig, 4, vocab_size=64, max_position_embeddings=64)
    model, expected = copy.deepcopy(own), Answers(own)
    torch_paged.accelerate(model, enable_prefix_caching=caching)
    prompts = [ids_of(n, n) for n in (9, 60, 64, 65, 100)]
    config = config_of(model, max_new_tokens=80)
    results = model.generate_batch(prompts, generation_config=config)
    for ids, result in zip(prompts, results.values(), strict=True):
        assert result.error is None and result.generated_tokens == expected(ids, 80)
    # One that comes while others run, longer than all that the tables have room for.
    width = find_session(model).core.state.max_blocks * 16
    manager = model.init_continuous_batching(generation_config=config)
    first = manager.add_request(prompts[0])
    manager.service.advance(tokens=True)
    second = manager.add_request(ids_of(width, 1), max_new_tokens=3)
    while not manager.service.is_idle:
        manager.service.advance(tokens=True)
    found = {r.request_id: r for r in (manager.output_router.output_queue.get() for _ in "12")}
    assert found[first].generated_tokens == expected(prompts[0], 80)
    assert found[second].generated_tokens == expected(ids_of(width, 1), 3)
    manager.destroy()


def test_a_request_without_a_limit_ends_at_the_length_of_the_model() -> None:
    own = tiny(LlamaConfig, 4, vocab_size=64, max_position_embeddings=64)
    model = copy.deepcopy(own)
    torch_paged.accelerate(model)
    config = config_of(model, max_new_tokens=None, max_length=None, eos_token_id=None)
    manager = model.init_continuous_batching(generation_config=config)
    manager.add_request(ids_of(60, 1), max_new_tokens=90, request_id="long")
    manager.add_request(ids_of(9, 9), request_id="open")
    while not manager.service.is_idle:
        manager.service.advance(tokens=True)
    found = {r.request_id: r for r in (manager.output_router.output_queue.get() for _ in "12")}
    assert len(found["long"].generated_tokens) == 90
    assert len(found["open"].generated_tokens) == 64 - 9
    manager.destroy()


def test_models_with_a_table_of_positions_end_there_and_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny(GPT2Config, 4, vocab_size=64, max_position_embeddings=48)
    torch_paged.accelerate(model)
    config = config_of(model, max_new_tokens=80)
    (result,) = model.generate_batch([ids_of(9, 9)], generation_config=config).values()
    assert result.error is None and len(result.generated_tokens) == 48 - 9
    assert "generate_batch() ends sequences at 48 tokens" in caplog.text


def test_what_a_deadline_ends_has_a_result_that_says_so(model: Any) -> None:
    (result,) = model.generate_batch(
        [PROMPTS[0]], generation_config=config_of(model, max_new_tokens=80), deadline=0.0
    ).values()
    assert result.error == "its deadline has passed" and result.is_finished()


def test_stopping_lets_requests_finish_unless_it_is_hard(model: Any, answers: Answers) -> None:
    for hard in (False, True):
        manager = model.init_continuous_batching(
            generation_config=config_of(model, max_new_tokens=60)
        )
        manager.start()
        manager.add_request(PROMPTS[0], request_id="a")
        manager.stop(block=True, hard_stop=hard)
        assert manager.add_request(PROMPTS[0]) is None
        result = manager.get_result()
        assert manager.get_result() is None
        full = answers(PROMPTS[0], 60)
        if hard:
            assert result.error == "the manager was stopped before the request had ended"
            assert result.generated_tokens == full[: len(result.generated_tokens)]
        else:
            assert result.generated_tokens == full
        manager.destroy()


def test_a_persistent_manager_sees_changed_weights(model: Any) -> None:
    config = config_of(model)
    prompt = ids_of(40, 3)
    for _ in range(2):
        results = model.generate_batch([prompt], generation_config=config, persistent_manager=True)
        expected = Answers(copy.deepcopy(model))(prompt, NUM_TOKENS)
        assert next(iter(results.values())).generated_tokens == expected
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.data.mul_(1.5)
    assert model.init_continuous_batching() is model._cached_continuous_batching_manager
    model.destroy_cached_continuous_batching_manager()
    assert not hasattr(model, "_cached_continuous_batching_manager")
    assert torch_paged.stats(model).kv_blocks_used == 0


def test_an_end_token_of_the_models_config_alone_ends_nothing(
    model: Any, answers: Answers
) -> None:
    # As in transformers, whose manager sets an end token that is None to -1 at first.
    model.config.eos_token_id = answers(PROMPTS[0], NUM_TOKENS)[2]
    results = model.generate_batch(PROMPTS[:1], generation_config=config_of(model))
    assert results["req_0"].generated_tokens == answers(PROMPTS[0], NUM_TOKENS)
    with model.continuous_batching_context_manager(generation_config=config_of(model)) as manager:
        manager.add_requests(PROMPTS[:1])
        result = manager.get_result(timeout=60)
    assert result.generated_tokens == answers(PROMPTS[0], NUM_TOKENS)


def test_a_persistent_manager_takes_the_config_of_each_call(model: Any, answers: Answers) -> None:
    ends = list(range(40))
    for count, eos in ((5, None), (3, None), (9, ends)):
        config = config_of(model, max_new_tokens=count, eos_token_id=eos)
        results = model.generate_batch(PROMPTS, generation_config=config, persistent_manager=True)
        expected = [answers(p, count, eos_token_id=eos, pad_token_id=0) for p in PROMPTS]
        assert [r.generated_tokens for r in results.values()] == expected
    sampled = config_of(model, do_sample=True, top_k=1, num_return_sequences=2)
    results = model.generate_batch(PROMPTS, generation_config=sampled, persistent_manager=True)
    assert len(results) == 2 * len(PROMPTS)
    model.destroy_cached_continuous_batching_manager()


def test_pausing_lets_weights_be_written(model: Any) -> None:
    with model.continuous_batching_context_manager(
        generation_config=config_of(model, max_new_tokens=60)
    ) as manager:
        name = manager.add_request(PROMPTS[0])
        with manager.pause():
            blocks = torch_paged.stats(model).steps
            assert torch_paged.stats(model).steps == blocks
        assert manager.get_result(timeout=60).request_id == name


def test_generate_and_generate_batch_alternate(model: Any, answers: Answers) -> None:
    ids = torch.tensor([PROMPTS[0]])
    for _ in range(2):
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False
        )
        assert out[0, 5:].tolist() == answers(PROMPTS[0], 9)
        results = model.generate_batch(PROMPTS, max_new_tokens=5)
        assert [r.generated_tokens for r in results.values()] == [answers(p, 5) for p in PROMPTS]


def test_bad_requests_are_refused_and_leave_nothing_behind(model: Any) -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        model.generate_batch([PROMPTS[0], []], max_new_tokens=3)
    with pytest.raises(ValueError, match="temperature"):
        model.generate_batch(PROMPTS, max_new_tokens=3, do_sample=True, temperature=-1.0)
    assert torch_paged.stats(model).kv_blocks_used == 0


@pytest.mark.parametrize(
    ("inputs", "error", "match"),
    [
        (None, TypeError, "inputs must be a list of prompts, each a list of token ids, got None"),
        ("text", TypeError, "inputs must be a list of prompts.*got 'text'; pass .*input_ids"),
        ([3, 4, 5], TypeError, r"inputs\[0\] must be token ids, got 3"),
        ([[3], None], TypeError, r"inputs\[1\] must be token ids, got None"),
        ([[3], "text"], TypeError, r"inputs\[1\] must be token ids, got a string"),
        ([[3], [1.5]], TypeError, r"inputs\[1\] must be integers"),
        ([[3], [10**6]], ValueError, r"inputs\[1\] must be in \[0, "),
    ],
)
def test_what_is_no_batch_of_prompts_is_refused(
    model: Any, inputs: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        model.generate_batch(inputs, max_new_tokens=3)
    assert torch_paged.stats(model).kv_blocks_used == 0


def test_a_generation_config_of_another_type_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="must be a GenerationConfig, got a dict"):
        model.generate_batch(PROMPTS, generation_config={"max_new_tokens": 3})


def test_arrays_of_prompts_are_batches(model: Any, answers: Answers) -> None:
    prompts = [PROMPTS[0], PROMPTS[0][::-1]]
    for inputs in (torch.tensor(prompts), np.array(prompts), tuple(map(tuple, prompts))):
        results = model.generate_batch(inputs, max_new_tokens=np.int64(3))
        assert [r.generated_tokens for r in results.values()] == [answers(p, 3) for p in prompts]


def test_names_that_transformers_ignores_are_ignored_aloud(
    model: Any, answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    results = model.generate_batch(PROMPTS[:1], max_new_tokens=3, no_such_field=1)
    assert results["req_0"].generated_tokens == answers(PROMPTS[0], 3)
    assert "ignores no_such_field" in caplog.text


@pytest.mark.parametrize("field", [{"no_repeat_ngram_size": 2}, {"torch_paged": False}])
def test_what_the_engine_cannot_do_is_transformers_again(
    field: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(
        ContinuousBatchingManager, "__init__", lambda self, **kwargs: made.append(kwargs)
    )
    model = torch_paged.accelerate(copy.deepcopy(small_model()))
    config = config_of(model)
    for name, value in field.items():
        setattr(config, name, value)
    manager = model.init_continuous_batching(generation_config=config)
    assert type(manager) is ContinuousBatchingManager and len(made) == 1
    (reason,) = torch_paged.explain(model).last_call.reasons
    assert next(iter(field)) in reason
    # Opting out is no fallback.
    expected = {} if "torch_paged" in field else {reason: 1}
    assert torch_paged.stats(model).fallbacks == expected
    torch_paged.restore(model)


def test_restoring_gives_the_original_methods_back() -> None:
    names = ("init_continuous_batching", "generate_batch")
    before = [getattr(ContinuousMixin, name) for name in names]
    model = torch_paged.accelerate(copy.deepcopy(small_model()))
    assert all(getattr(GenerationMixin, n) is not b for n, b in zip(names, before, strict=True))
    torch_paged.restore(model)
    assert [getattr(ContinuousMixin, name) for name in names] == before
    assert [getattr(GenerationMixin, name) for name in names] == before


def test_a_model_that_is_not_accelerated_passes_through(
    monkeypatch: pytest.MonkeyPatch, accelerate: Any
) -> None:
    accelerate(copy.deepcopy(small_model()))
    other = copy.deepcopy(small_model())
    made = []
    monkeypatch.setattr(
        ContinuousBatchingManager, "__init__", lambda self, **kwargs: made.append(kwargs)
    )
    manager = other.init_continuous_batching(generation_config=config_of(other))
    assert type(manager) is ContinuousBatchingManager and len(made) == 1
