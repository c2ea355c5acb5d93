"""What transformers' assisted decoding asks of what it is handed, and of candidate generators."""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from typing import Any

import pytest
import torch
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM, LogitsProcessorList
from transformers.generation import candidate_generator as candidates

from torch_paged.generate.assisted import SpeculativeBlocks, VerifyingModel, assisted_decoding
from torch_paged.patches import draft_seams, seams

# The one of transformers, also where a model is accelerated.
ASSISTED_DECODING = seams.DECODING_SEAMS["_assisted_decoding"].original


def attributes(function: Any, owner: str) -> set[str]:
    """Return the attributes that a function reads from a variable."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (isinstance(node.value, ast.Name) and node.value.id == owner)
    }


def cache_attributes(function: Any) -> set[str]:
    """Return what a function reads from its cache, and from that of the outputs."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Attribute):
            continue
        inner = node.value
        if inner.attr in ("cache", "past_key_values") and isinstance(inner.value, ast.Name):
            names |= {node.attr} if inner.value.id == "outputs" else set()
    return names | attributes(function, "cache")


def test_assisted_decoding_has_the_arguments_that_we_replace() -> None:
    theirs = list(inspect.signature(ASSISTED_DECODING).parameters)
    assert theirs == list(inspect.signature(assisted_decoding).parameters)


def test_assisted_decoding_asks_the_model_for_nothing_that_we_do_not_know() -> None:
    names = attributes(ASSISTED_DECODING, "self")
    ours = {name for name in vars(VerifyingModel) if not name.startswith("__")}
    own = {"config", "device", "_has_unfinished_sequences", "get_compiled_call", "__call__"}
    assert names - ours <= own
    # Newer releases know the last two.
    assert ours - names <= {"_valid_auto_compile_criteria", "_optimize_model_for_decode"}


def test_assisted_decoding_asks_the_cache_for_nothing_that_we_do_not_know() -> None:
    ours = {name for name in vars(SpeculativeBlocks) if not name.startswith("__")}
    assert {"crop"} <= cache_attributes(ASSISTED_DECODING) <= ours


def test_generators_call_what_we_replace() -> None:
    assisted = candidates.AssistedCandidateGenerator
    assert "_generate_candidates" in attributes(assisted.get_candidates, "self")
    assert {"generate"} == cache_free_calls(assisted._generate_candidates)
    source = inspect.getsource(assisted._generate_candidates)
    assert "generate(**generation_args, **self.assistant_kwargs)" in source


def cache_free_calls(function: Any) -> set[str]:
    """Return the methods of the assistant that a function calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Attribute)
        and node.func.value.attr == "assistant_model"
    }


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=30,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


class Spy:
    """Keeps the generator of a call of assisted decoding, and its first arguments."""

    def __init__(self, monkeypatch: Any) -> None:
        self.calls: list[tuple[Any, dict[str, Any]]] = []
        original = candidates.AssistedCandidateGenerator._generate_candidates

        def generate(generator: Any, arguments: dict[str, Any]) -> Any:
            self.calls.append((generator, dict(arguments)))
            return original(generator, arguments)

        monkeypatch.setattr(
            candidates.AssistedCandidateGenerator, "_generate_candidates", generate
        )


def test_resolved_arguments_are_those_of_sample(model, monkeypatch) -> None:
    spy, handed = Spy(monkeypatch), []
    sample = GenerationMixin._sample

    def note(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        handed.append((logits_processor, stopping_criteria, generation_config))
        return sample(
            self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
        )

    ids = torch.arange(3, 12)[None]
    options = {"do_sample": True, "temperature": 0.7, "top_k": 5, "max_new_tokens": 6}
    with monkeypatch.context() as patch:
        patch.setattr(GenerationMixin, "_sample", note)
        model.generate(ids, assistant_model=copy.deepcopy(model), pad_token_id=0, **options)
    (generator, arguments), (processors, criteria, config) = spy.calls[0], handed[0]
    generator.assistant_kwargs.pop("cache", None)
    generator.assistant_kwargs.pop("past_key_values", None)
    generator.assistant_kwargs["position_ids"] = torch.arange(9)[None]  # as in the first round
    call = draft_seams.resolve_draft(generator, arguments, is_first=True)
    assert torch.equal(call.input_ids, ids)
    assert [type(p) for p in call.logits_processor] == [type(p) for p in processors]
    own = generator.logits_processor
    assert len(own) == 2 and all(any(p is mine for p in call.logits_processor) for mine in own)
    assert [type(c) for c in call.stopping_criteria] == [type(c) for c in criteria]
    assert call.generation_config.do_sample and call.generation_config.is_assistant
    assert call.generation_config.max_length == config.max_length
    assert call.model_kwargs["position_ids"].shape == (1, 9)
    longer = torch.arange(3, 15)[None]
    later = draft_seams.resolve_draft(generator, arguments | {"input_ids": longer}, is_first=False)
    assert later.model_kwargs["position_ids"].tolist() == [list(range(12))]


def test_drafting_is_replaced_and_restored(model, monkeypatch) -> None:
    spy = Spy(monkeypatch)
    ids = torch.arange(3, 12)[None]
    expected = model.generate(
        ids, assistant_model=model, max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    generator, arguments = spy.calls[0]
    draft_seams.replace_drafting(generator, lambda arguments: "ours")
    assert generator._generate_candidates(arguments) == "ours"
    for name in ("cache", "past_key_values"):
        generator.assistant_kwargs.pop(name, None)
    drafted, _ = draft_seams.restore_drafting(generator, arguments)
    assert 9 < drafted.shape[1] and torch.equal(drafted, expected[:, : drafted.shape[1]])
    assert "_generate_candidates" not in vars(generator)


@pytest.mark.parametrize("eos", [None, 7])
def test_lookup_on_the_host_finds_the_same(eos) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9, 5, 6]])
    ends = None if eos is None else torch.tensor([eos])

    def make() -> Any:
        return candidates.PromptLookupCandidateGenerator(
            eos_token_id=ends,
            num_output_tokens=3,
            max_length=40,
            logits_processor=LogitsProcessorList(),
        )

    ours, theirs = (
        make(),
        candidates.PromptLookupCandidateGenerator(
            eos_token_id=ends,
            num_output_tokens=3,
            max_length=40,
            logits_processor=LogitsProcessorList(),
            vocab_size=30,
        ),
    )
    draft_seams.look_up_on_host(ours)
    for length in (3, 6, 7):
        got, expected = (g.get_candidates(ids[:, :length])[0] for g in (ours, theirs))
        assert torch.equal(got, expected)
    assert got.shape[1] == (10 if eos is None else 7)


def test_lookup_with_processors_stays() -> None:
    generator = candidates.PromptLookupCandidateGenerator(logits_processor=[object()])
    draft_seams.look_up_on_host(generator)
    assert "get_candidates" not in vars(generator) and generator.logits_processor


def test_padding_that_generate_infers(model, monkeypatch) -> None:
    spy = Spy(monkeypatch)
    ids = torch.arange(3, 12)[None]
    found = []
    for kwargs in ({}, {"eos_token_id": 0}, {"attention_mask": (ids != 3).long()}):
        helper = copy.deepcopy(model)
        model.generate(ids, assistant_model=helper, max_new_tokens=4, pad_token_id=0, **kwargs)
        generator, arguments = spy.calls[-1]
        for name in ("cache", "past_key_values"):
            generator.assistant_kwargs.pop(name, None)
        call = draft_seams.resolve_draft(generator, arguments, is_first=True)
        found.append(draft_seams.inferred_padding(generator, call.generation_config))
    # Older releases hand on a mask of ones.
    drops = spy.calls[0][0].assistant_kwargs["attention_mask"] is None
    assert found == [0 if drops else None, None, None]
