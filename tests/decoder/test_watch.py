"""What the watch notices between two runs."""

import copy

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from torch_paged.decoder.watch import ModuleWatch
from torch_paged.patches.families import read_spec


def make():
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=50,
    )
    model = LlamaForCausalLM(config)
    return model, ModuleWatch(model, read_spec(model))


def test_in_place_writes_change_nothing():
    model, watch = make()
    key = watch.storage_key()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
        model.model.norm.weight.data.copy_(torch.zeros(32))
    assert watch.storage_key() == key
    assert not watch.structure_changed()


def test_moved_storage_changes_the_key_only():
    model, watch = make()
    key = watch.storage_key()
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    assert watch.storage_key() != key
    assert not watch.structure_changed()


def test_dtype_change_changes_the_key():
    model, watch = make()
    key = watch.storage_key()
    model.bfloat16()
    assert watch.storage_key() != key


def test_replaced_modules_hooks_and_instance_forwards_are_structure():
    model, watch = make()
    model.model.layers[0].mlp.up_proj = nn.Linear(32, 48, bias=False)
    assert watch.structure_changed()
    model, watch = make()
    handle = model.model.layers[1].register_forward_hook(lambda *a: None)
    assert watch.structure_changed()
    handle.remove()
    assert not watch.structure_changed()
    model, watch = make()
    model.model.layers[1].mlp.forward = lambda x: x
    assert watch.structure_changed()


def test_other_classes_and_other_own_forwards_are_structure(monkeypatch):
    model, watch = make()
    norm = model.model.norm
    norm.__class__ = type("Other", (type(norm),), {})
    assert watch.structure_changed()
    norm.__class__ = type(norm).__mro__[1]
    assert not watch.structure_changed()
    monkeypatch.setattr(type(norm), "forward", lambda self, hidden: hidden)
    assert not watch.structure_changed()
    monkeypatch.undo()
    model.model.norm.forward = first = lambda hidden: hidden
    watch = ModuleWatch(model, read_spec(model))
    model.model.norm.forward = lambda hidden: -first(hidden)
    assert watch.structure_changed()


def test_the_watch_does_not_keep_the_model_alive():
    import gc
    import weakref

    model, watch = make()
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None
    assert watch.storage_key()
