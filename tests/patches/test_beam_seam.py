"""What transformers' beam search asks of the model and the cache that it is handed."""

from __future__ import annotations

import ast
import inspect
import textwrap

import torch

from torch_paged.generate.beams import BeamBlocks, RunAsModel
from torch_paged.patches import seams

# The one of transformers, also where a model is accelerated.
BEAM_SEARCH = seams.DECODING_SEAMS["_beam_search"].original


def uses(function) -> tuple[set[str], bool]:
    """Return the attributes that a method reads from self, and whether it calls self."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names, called = set(), False
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names |= {node.attr} if node.value.id == "self" else set()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called |= node.func.id == "self"
    return names, called


def test_beam_search_has_the_arguments_that_we_replace() -> None:
    names = list(inspect.signature(BEAM_SEARCH).parameters)
    assert names == [
        "self",
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "synced_gpus",
        "model_kwargs",
    ]


def test_beam_search_asks_the_model_for_nothing_that_we_do_not_know() -> None:
    names, called = uses(BEAM_SEARCH)
    ours = {name for name in vars(RunAsModel) if not name.startswith("__")} - {"_output"}
    scoring = {
        "_beam_search_has_unfinished_sequences",
        "_check_early_stop_heuristic",
        "_flatten_beam_dim",
        "_get_running_beams_for_next_iteration",
        "_get_top_k_continuations",
        "_has_unfinished_sequences",
        "_unflatten_beam_dim",
        "_update_finished_beams",
    }
    assert called and ours <= names
    assert names - ours - scoring <= {
        "config",
        "_reorder_cache",
        "__class__",
        "get_output_embeddings",
    }


def test_beam_search_asks_the_cache_for_its_reordering_alone() -> None:
    source = inspect.getsource(BEAM_SEARCH)
    assert source.count(".reorder_cache(") == 1
    assert [name for name in vars(BeamBlocks) if not name.startswith("_")] == ["reorder_cache"]


def test_margin_of_a_bias_is_that_of_the_installed_release() -> None:
    processor = seams.logits_process.SequenceBiasLogitsProcessor([[[1, 2], 1.0]])
    for length in (1, 2, 3):
        scores = processor(torch.ones((1, length), dtype=torch.long), torch.zeros(1, 3))
        assert bool(scores[0, 2]) == (length >= 1 + seams.sequence_bias_margin())
