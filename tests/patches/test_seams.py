"""Contracts with transformers, run on the oldest and the newest supported release."""

import importlib
import inspect

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from torch_paged.patches import seams
from torch_paged.patches.families import FAMILIES


def test_sample_has_the_arguments_that_we_replace():
    names = list(inspect.signature(GenerationMixin._sample).parameters)
    assert names == [
        "self",
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "synced_gpus",
        "streamer",
        "model_kwargs",
    ]


def test_cache_with_windows_forgets_what_they_do_not_show():
    config = MistralConfig(num_hidden_layers=2, sliding_window=4)
    states = torch.arange(7.0).reshape(1, 1, 7, 1)
    sliding, plain = DynamicCache(config=config), DynamicCache()
    for cache in (sliding, plain):
        for layer in range(2):
            cache.update(states, states, layer)
    assert sliding.layers[0].keys.flatten().tolist() == [4, 5, 6]
    assert seams.forgets_behind_windows(sliding, (4, 4))
    assert seams.forgets_behind_windows(sliding, (5, 0))  # kept for longer than it remembers
    assert not seams.forgets_behind_windows(sliding, (3, 4))
    assert not seams.forgets_behind_windows(sliding, (4,))
    assert not seams.forgets_behind_windows(plain, (4, 4))
    assert seams.forgets_behind_windows(plain, (0, 0))
    single = DynamicCache(config=MistralConfig(num_hidden_layers=2, sliding_window=1))
    assert not seams.forgets_behind_windows(single, (1, 1))
    if hasattr(sliding, "activate_past_recording"):
        sliding.activate_past_recording()
        assert not seams.forgets_behind_windows(sliding, (4, 4))


def test_doors_of_continuous_batching_have_the_arguments_that_we_replace():
    names = {name: seam.original for name, seam in seams.BATCHING_SEAMS.items()}
    arguments = list(inspect.signature(names["init_continuous_batching"]).parameters)
    assert arguments == [
        "self",
        "generation_config",
        "continuous_batching_config",
        "workload_hints",
    ]
    assert list(inspect.signature(names["generate_batch"]).parameters) == [
        "self",
        "inputs",
        "generation_config",
        "continuous_batching_config",
        "record_timestamps",
        "progress_bar",
        "persistent_manager",
        "warmup",
        "kwargs",
    ]


def test_manager_replaces_everything_that_needs_the_bases_constructor():
    from torch_paged.generate.manager import EngineManager

    base = seams.ContinuousBatchingManager
    public = {name for name in vars(base) if not name.startswith("_")}
    # These read only what our constructor sets as well.
    inherited = {"get_result", "request_id_iter", "register_result_handler"}
    # Never called from outside the base: it switches the model's attention.
    inherited.add("switch_to_cb_friendly_attn")
    assert public - set(vars(EngineManager)) == inherited


@pytest.mark.parametrize("key", FAMILIES, ids=lambda key: key[1])
def test_every_row_names_a_class_that_exists(key):
    module, name = key
    cls = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    assert issubclass(cls, GenerationMixin)
    assert cls._sample is GenerationMixin._sample


def test_seam_is_counted_and_leaves_foreign_patches_alone():
    original = GenerationMixin._sample

    def ours(self, *args, **kwargs):
        return None

    seam = seams.MethodSeam("_sample")
    try:
        seam.install(ours)
        seam.install(ours)
        assert GenerationMixin._sample is ours
        assert seam.original is original
        seam.uninstall()
        assert GenerationMixin._sample is ours
        seam.uninstall()
        assert GenerationMixin._sample is original
        seam.install(ours)

        def foreign(self, *args, **kwargs):
            return ours(self)

        GenerationMixin._sample = foreign
        seam.uninstall()
        assert GenerationMixin._sample is foreign
        # Ours still stands behind the foreign patch: coming back must not wrap it again.
        seam.install(ours)
        assert GenerationMixin._sample is foreign
        assert seam.original is original
        seam.uninstall()
    finally:
        GenerationMixin._sample = original


def test_warpers_are_functions_of_the_scores_alone():
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    for cls, attributes in seams.SCORE_WARPERS.items():
        warper = cls(**{name: 5 if name == "top_k" else 0.5 for name in attributes[:1]})
        assert all(hasattr(warper, name) for name in attributes)
        assert torch.equal(warper(None, scores.clone()), warper(torch.ones(3, 2).long(), scores))


def test_generate_marks_a_cache_of_the_caller_and_makes_a_dynamic_one():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=30,
    )
    model = LlamaForCausalLM(config)
    seen = []

    def spy(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        cache = seams.call_cache(kwargs)
        seen.append((cache, seams.cache_is_user_defined(cache)))
        assert kwargs["position_ids"].shape[-1] == 4
        return input_ids

    original = GenerationMixin._sample
    GenerationMixin._sample = spy
    try:
        ids = torch.ones(1, 4, dtype=torch.long)
        model.generate(ids, max_new_tokens=2, pad_token_id=0)
        out = model(ids, use_cache=True)
        mine = next(out[name] for name in seams.CACHE_NAMES if name in out)
        ids = torch.ones(1, 4, dtype=torch.long)
        name = next(n for n in seams.CACHE_NAMES if n in out)
        mine.crop(-1)
        model.generate(ids, max_new_tokens=2, pad_token_id=0, **{name: mine})
    finally:
        GenerationMixin._sample = original
    assert seams.is_plain_dynamic_cache(seen[0][0]) and not seen[0][1]
    assert seen[1][0] is mine and seen[1][1]


def test_hooks_left_by_hidden_states_are_recognised():
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=30,
    )
    model = LlamaForCausalLM(config)
    model(torch.ones(1, 4, dtype=torch.long), output_hidden_states=True)
    hooks = [h for m in model.modules() for h in m._forward_hooks.values()]
    assert hooks and all(seams.is_output_capturing_hook(hook) for hook in hooks)


def test_longrope_frequencies_are_those_of_a_module_past_its_limit():
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1],
        "long_factor": [2.0, 3.0],
        "original_max_position_embeddings": 8,
        "factor": 4.0,
    }
    config = LlamaConfig(head_dim=4, rope_parameters=parameters)
    module = LlamaRotaryEmbedding(config)
    module(torch.zeros(1), torch.tensor([[8]]))
    assert torch.equal(seams.longrope_frequencies(config, 8, None), module.inv_freq)
    assert not torch.equal(module.original_inv_freq, module.inv_freq)


def test_beams_and_assistants_are_decoding_methods_of_their_own():
    assert {"_sample", "_beam_search", "_assisted_decoding"} <= set(seams.DECODING_SEAMS)
