"""tests.hf_generation on a checkout of our own: what it runs, counts, compares and reports."""

from __future__ import annotations

import copy
import textwrap
from pathlib import Path

import pytest

from tests.hf_generation.__main__ import differences, main

MIXIN = """
    class GenerationTesterMixin:
        def test_greedy(self):
            model, ids, mask = make()
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=3, return_dict_in_generate=True
            )
            assert out.sequences.shape == (2, 8)

        def test_without_a_cache(self):
            model, ids, mask = make()
            model.generate(ids, attention_mask=mask, max_new_tokens=3, use_cache=False)

        def test_right_padding(self):
            model, ids, mask = make()
            model.generate(ids, attention_mask=mask.flip(1), max_new_tokens=3)

        def test_raises(self):
            model, ids, _ = make()
            with pytest.raises(ValueError):
                model.generate(ids, max_new_tokens=-1)

        def test_skips(self):
            pytest.skip("not here")

        def test_fails_both_ways(self):
            raise AssertionError("always")
"""

SETUP = """
    import pytest
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def make():
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, eos_token_id=None, pad_token_id=0,
        )
        mask = torch.ones(2, 5, dtype=torch.long)
        mask[0, :2] = 0
        return LlamaForCausalLM(config).eval(), torch.randint(1, 64, (2, 5)), mask
"""

TESTS = """
    from ...generation.test_utils import GenerationTesterMixin, make

    class TestLlama(GenerationTesterMixin):
        def test_not_of_generation(self):
            raise AssertionError("must not be run")
"""

# Looks inside, which a model that is accelerated does not survive.
INSPECTS = """
        def test_inspects(self):
            model, ids, mask = make()
            model.generate(ids, attention_mask=mask, max_new_tokens=1)
            from torch_paged import is_accelerated
            assert not is_accelerated(model), "changed"

        def test_asks_and_answers(self):
            model, ids, mask = make()
            from torch_paged import is_accelerated
            model.generate(ids, attention_mask=mask, max_new_tokens=1)
            tokens = 3 if is_accelerated(model) else 2
            model.generate(ids, attention_mask=mask, max_new_tokens=tokens)
"""


def checkout(folder: Path, mixin: str) -> Path:
    files = {
        "test_modeling_common.py": "global_rng = None",
        "generation/test_utils.py": textwrap.dedent(SETUP) + textwrap.dedent(mixin),
        "models/llama/test_modeling_llama.py": textwrap.dedent(TESTS),
    }
    # The plugin seeds what this module holds; transformers' tests import it.
    files["generation/test_utils.py"] += "\nfrom .. import test_modeling_common\n"
    for name, text in files.items():
        path = folder / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(folder).parents[:-1]:
            (folder / parent / "__init__.py").touch()
        path.write_text(text)
    return folder


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_equal_results(tmp_path, capsys) -> None:
    assert main([str(checkout(tmp_path, MIXIN)), "--models", "llama"]) == 0
    printed = lines(capsys)
    assert "plain 4 1 1" in printed and "accelerated 4 1 1" in printed
    assert "3 calls decoded:" in printed
    assert "1 33.3% fused, device loop" in printed and "2 66.7% eager" in printed
    assert "1 eager: use_cache=False" in printed and "1 eager: right padding" in printed
    assert any("1 failed both ways" in line and "always" in line for line in printed)
    assert printed[-1] == "0 differences"


def test_different_results(tmp_path, capsys) -> None:
    folder = checkout(tmp_path, MIXIN + INSPECTS)
    assert main([str(folder), "--models", "llama", "--lean", "--every-test"]) == 1
    printed = lines(capsys)
    # Lean: the padding on the right is on the left now. Every test: also that of no mixin.
    assert "5 83.3% fused, device loop" in printed and "1 16.7% eager" in printed
    assert "plain 6 2 1" in printed and "accelerated 5 3 1" in printed
    where = "tests/models/llama/test_modeling_llama.py::TestLlama::"
    assert any(line.startswith(f"{where}test_inspects: passed -> failed: ") for line in printed)
    assert f"{where}test_asks_and_answers: call 1 returned other sequences" in printed
    assert "2 differences" in printed


def test_no_checkout(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "must be a checkout of transformers" in capsys.readouterr().err


def test_figures_within_rounding_are_equal() -> None:
    output = {"sequences": [[1, 2]], "scores": [[[1, 9], 9, 0.125, 0.5]]}
    plain = {"a": {"outcome": "passed", "why": "", "calls": [{"output": output}]}}
    other = copy.deepcopy(plain)
    scores = other["a"]["calls"][0]["output"]["scores"][0]
    scores[2] += 1e-7
    assert differences(plain, other) == []
    scores[2] += 1e-3
    assert differences(plain, other) == ["a: call 0 returned other scores"]
    other["a"]["calls"][0]["output"] = None
    assert differences(plain, other) == ["a: call 0 returned other error"]
    other["a"]["calls"] = []
    assert differences(plain, other) == ["a: 1 calls -> 0 calls"]
    del other["a"]
    assert differences(plain, other) == ["a: only plain"]
