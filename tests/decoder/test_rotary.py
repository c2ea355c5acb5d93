"""Tables of rotary frequencies: graphs read them wherever they were when captured."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from pathlib import Path

import torch
from transformers import LlamaConfig

import torch_paged
from torch_paged.generate.registry import find_session

# For `models`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import greedy, prompt, tiny  # noqa: E402

from torch_paged.decoder import rotary  # noqa: E402


def test_a_table_stays_in_place_when_plans_are_bound_anew() -> None:
    model = tiny(LlamaConfig, 2).to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    with torch_paged.accelerated(model, on_unsupported="raise"):
        with torch.inference_mode():
            greedy(model, prompt(5, 1))
        step = find_session(model).step
        (spec,) = step.spec.rotaries
        table = rotary.inverse_frequencies(spec)
        alive = weakref.ref(table)
        place = table.data_ptr()
        del table
        step.bind(step._binding)
        gc.collect()
        assert alive() is not None
        greedy(model, prompt(5, 1))
        assert rotary.inverse_frequencies(spec).data_ptr() == place


def test_a_table_goes_with_its_module_and_follows_its_values() -> None:
    model = tiny(LlamaConfig, 2).to(torch.bfloat16)
    with torch_paged.accelerated(copy.deepcopy(model)) as fast:
        greedy(fast, prompt(5, 1))
        (spec,) = find_session(fast).step.spec.rotaries
        fast.model.rotary_emb.inv_freq.mul_(2)
        table = rotary.inverse_frequencies(spec)
        assert torch.equal(table, fast.model.rotary_emb.inv_freq.float())
        alive = weakref.ref(table)
    del fast, spec, table
    gc.collect()
    assert alive() is None
