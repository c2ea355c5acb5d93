"""The adapter for lm-evaluation-harness, held against Hugging Face's forward and `generate()`."""

from __future__ import annotations

import copy
import importlib.util
import runpy
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "lm_eval_adapter.py"
sys.path += [str(ROOT / "tests"), str(SCRIPT.parent)]

from models import byte_tokenizer, smallest_gap, tiny  # noqa: E402

TEXTS = ["Once", "the cat sat", " on the mat", "0123456789" * 3, "x", "a b  c"]
LIMIT = 48  # tokens that the model allows


class Recorder:
    """Stands in for the harness's cache hook, which hears of each result."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any, Any]] = []

    def add_partial(self, name: str, args: Any, result: Any) -> None:
        self.heard.append((name, tuple(args), result))


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """Load the example, over what the harness's base class does if it is not installed."""
    names = ("lm_eval", "lm_eval.api", "lm_eval.api.model")
    is_there = importlib.util.find_spec("lm_eval") is not None
    if not is_there:
        for name in names:
            sys.modules[name] = types.ModuleType(name)

        class LM:
            def __init__(self) -> None:
                self.cache_hook: Any = SimpleNamespace(add_partial=lambda *args: None)

        sys.modules[names[-1]].LM = LM  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("lm_eval_adapter", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    if not is_there:
        for name in names:
            del sys.modules[name]


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny(LlamaConfig, 3, vocab_size=264, max_position_embeddings=LIMIT, num_hidden_layers=1)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    assert tokenizer.eos_token_id is not None
    return tokenizer


@pytest.fixture
def adapter(script: ModuleType, reference: Any, tokenizer: Any) -> Iterator[Any]:
    model = script.TorchPagedLM(
        copy.deepcopy(reference), tokenizer, max_num_seqs=4, max_num_batched_tokens=24
    )
    model.cache_hook = Recorder()
    yield model
    model.close()


def requests_of(*args: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in args]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def likelihood(model: Any, ids: list[int], count: int) -> tuple[float, bool]:
    """Score the last `count` of `ids` with Hugging Face's forward."""
    with torch.no_grad():
        rows = model(torch.tensor([ids[:-1]])).logits[0, -count:].double().log_softmax(-1)
    assert smallest_gap([rows]) > 1e-4, "a near tie decides this case: take another seed"
    target = torch.tensor(ids[-count:])
    total = rows.gather(1, target[:, None]).sum().item()
    return total, bool((rows.argmax(-1) == target).all())


def test_continuations_are_scored_as_the_model_does(
    adapter: Any, reference: Any, tokenizer: Any
) -> None:
    pairs = [(a, b) for a in TEXTS for b in TEXTS]
    # One that greedy decoding finds.
    start = ids_of(tokenizer, "Once")
    found = reference.generate(torch.tensor([start]), max_new_tokens=3, do_sample=False)
    texts = [(tokenizer.decode(start), tokenizer.decode(found[0, len(start) :]))]
    is_text = ids_of(tokenizer, texts[0][1]) == found[0, len(start) :].tolist()
    results = adapter.loglikelihood(requests_of(*pairs))
    assert len(results) == len(pairs)
    for (context, continuation), (total, greedy) in zip(pairs, results, strict=True):
        ids = ids_of(tokenizer, context) + ids_of(tokenizer, continuation)
        count = len(ids_of(tokenizer, continuation))
        expected, is_greedy = likelihood(reference, ids[-LIMIT + 1 :], count)
        assert total == pytest.approx(expected, abs=1e-3) and greedy == is_greedy
    if is_text:
        assert adapter.loglikelihood(requests_of(*texts))[0][1]
    heard = {args: result for name, args, result in adapter.cache_hook.heard}
    assert all(heard[pair] == result for pair, result in zip(pairs, results, strict=True))


def test_a_context_is_computed_once_for_its_continuations(
    adapter: Any, reference: Any, tokenizer: Any
) -> None:
    context, endings = "the cat sat on the mat of the house", ["x", " and saw", " 7", "0123"]
    session = adapter._engine._service.session()
    step, lengths = session.core.step, []
    prefill = step.prefill

    def counting(inputs: Any) -> torch.Tensor:
        lengths.append(len(inputs.ids) - (0 if inputs.decoding is None else len(inputs.decoding)))
        return prefill(inputs)

    step.prefill = counting
    results = adapter.loglikelihood(requests_of(*((context, ending) for ending in endings)))
    first = ids_of(tokenizer, context)
    texts = [ids_of(tokenizer, context + ending) for ending in endings]
    shared = (len(first) - 1) // session.config.block_size * session.config.block_size
    assert shared >= 32 and sum(lengths) == sum(map(len, texts)) - 3 * shared
    for ids, (total, greedy) in zip(texts, results, strict=True):
        expected, is_greedy = likelihood(reference, ids, len(ids) - len(first))
        assert total == pytest.approx(expected, abs=1e-3) and greedy == is_greedy


def test_greedy_continuations_are_recognised(
    adapter: Any, reference: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, as not every token of a random model is a text."""
    start = ids_of(tokenizer, "the cat")
    out = reference.generate(torch.tensor([start]), max_new_tokens=5, do_sample=False)
    found = out[0, len(start) :].tolist()
    other = [*found[:4], (found[4] + 1) % 250]
    for continuation, is_greedy in ((found, True), (other, False), (found[:1], True)):
        monkeypatch.setattr(adapter, "_encode_pair", lambda *_, c=continuation: (start, c))
        total, greedy = adapter.loglikelihood(requests_of(("", "")))[0]
        expected, _ = likelihood(reference, start + continuation, len(continuation))
        assert greedy == is_greedy and total == pytest.approx(expected, abs=1e-3)


def test_contexts_begin_and_end_as_the_harness_has_them(adapter: Any, tokenizer: Any) -> None:
    eos = tokenizer.eos_token_id
    first = eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    assert adapter.prefix_token_id == first
    assert adapter._encode_pair("", "ab") == ([first], ids_of(tokenizer, "ab"))
    pair = (ids_of(tokenizer, "a"), ids_of(tokenizer, "  b"))
    assert adapter._encode_pair("a  ", "b") == pair
    assert adapter._encode_pair("  ", "b") == ([first], ids_of(tokenizer, "  b"))
    word = tokenizer.decode([first])
    assert adapter._encode_pair("", word + "b") == ([first], ids_of(tokenizer, "b"))


@pytest.mark.parametrize("length", [1, 2, LIMIT - 3, LIMIT - 2, LIMIT - 1, 2 * LIMIT, 150])
def test_long_texts_are_scored_in_windows(
    adapter: Any, reference: Any, tokenizer: Any, length: int
) -> None:
    text = ("the cat sat on the mat and saw 7 mice. " * 9)[:length]
    tokens = ids_of(tokenizer, text)
    assert len(tokens) == length
    size, expected = LIMIT - 2, 0.0
    assert adapter.max_length == size
    for start in range(0, length, size):
        end = min(start + size, length)
        window = [adapter.prefix_token_id, *tokens[:end]][-size - 1 :]
        expected += likelihood(reference, window, end - start)[0]
    result = adapter.loglikelihood_rolling(requests_of((text,), ("x",)))
    assert result[0] == pytest.approx(expected, abs=2e-3)
    one = likelihood(reference, [adapter.prefix_token_id, *ids_of(tokenizer, "x")], 1)[0]
    assert result[1] == pytest.approx(one, abs=1e-3)
    assert adapter.loglikelihood_rolling(requests_of(("",))) == [0.0]


def test_texts_are_generated_up_to_a_stop_string(
    adapter: Any, reference: Any, tokenizer: Any
) -> None:
    whole = {}
    for text in TEXTS[:3]:
        ids = torch.tensor([ids_of(tokenizer, text)])
        out = reference.generate(
            ids, max_new_tokens=12, do_sample=False, eos_token_id=tokenizer.eos_token_id
        )
        whole[text] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    free = adapter.generate_until(
        requests_of(*((t, {"until": [], "max_gen_toks": 12}) for t in whole))
    )
    assert free == list(whole.values())
    for text, full in whole.items():
        for stop in {full[2:4], full[5:6]} - {""}:
            fields = {"until": [stop, "no such text"], "max_gen_toks": 12, "temperature": 0.0}
            found = adapter.generate_until(requests_of((text, fields)))
            assert found == [full.split(stop)[0]]
    drawn = {"until": "\n\n", "max_gen_toks": 12, "do_sample": True, "temperature": 2.0}
    texts = adapter.generate_until(requests_of(*(("Once", {**drawn, "seed": i}) for i in (1, 2))))
    assert texts[0] != texts[1]
    with pytest.raises(ValueError, match="max_gen_toks"):
        adapter.generate_until(requests_of(("Once", {"max_gen_toks": LIMIT})))


def test_the_fields_that_a_task_gave_are_left_as_they_were(adapter: Any) -> None:
    fields = {"until": ["."], "max_gen_toks": 3, "temperature": 0.0}
    before = copy.deepcopy(fields)
    adapter.generate_until(requests_of(("Once", fields)))
    assert fields == before


def test_many_requests_share_the_engine(adapter: Any, reference: Any, tokenizer: Any) -> None:
    pairs = [(f"{i} and", f" {i + 1}") for i in range(40)]
    for pair, (total, _) in zip(pairs, adapter.loglikelihood(requests_of(*pairs)), strict=True):
        parts = [ids_of(tokenizer, text) for text in pair]
        expected, _ = likelihood(reference, parts[0] + parts[1], len(parts[1]))
        assert total == pytest.approx(expected, abs=1e-3)


def test_what_cannot_be_scored_is_refused(
    adapter: Any, script: ModuleType, reference: Any, tokenizer: Any
) -> None:
    with pytest.raises(ValueError, match="max_length"):
        adapter.loglikelihood(requests_of(("a", "b" * LIMIT)))
    with pytest.raises(ValueError, match="max_length"):
        script.TorchPagedLM(copy.deepcopy(reference), tokenizer, max_length=LIMIT)
    assert len(adapter.loglikelihood(requests_of(("a", "b")))) == 1


def test_without_the_harness_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match="run 'pip install lm_eval'$"):
        runpy.run_path(str(SCRIPT), run_name="lm_eval_adapter")
