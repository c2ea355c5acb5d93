"""The table of types: what ran in which tier, and whether its tokens are Hugging Face's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from torch_paged.__main__ import main
from torch_paged.decoder.step import DecoderStep
from torch_paged.generate.support.parity import LEAST_COMPARED, NEAR_TIE, compare_tokens
from torch_paged.patches import families

QWEN3 = ("qwen3.modeling_qwen3", "Qwen3ForCausalLM")


def rows_of(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split(maxsplit=3)[1:] for line in text.splitlines() if line}


def test_types_are_built_run_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    types = ["llama", "jamba", "bart", "musicgen"]
    files = [tmp_path / "rows.json", tmp_path / "page.md"]
    written = ["--json", str(files[0]), "--markdown", str(files[1])]
    assert main(["support", "--types", *types, *written]) == 0
    out = capsys.readouterr().out
    rows = rows_of(out)
    assert rows["llama"] == ["fused", "equal"]
    assert rows["jamba"] == ["patched", "equal"]
    assert rows["bart"][:2] == ["eager", "equal"] and "position_ids" in rows["bart"][2]
    assert rows["musicgen"] == ["-", "not", "built  decodes audio codes"]
    assert out.splitlines()[-1] == (
        "4 types: 1 fused, 1 patched, 1 eager, 1 not built; all that ran are equal"
    )
    data = json.loads(files[0].read_text("utf-8"))
    assert data["versions"]["transformers"] == transformers.__version__
    assert [row["model_type"] for row in data["rows"]] == types
    page = files[1].read_text("utf-8")
    assert f"support --types {' '.join(types)} --markdown" in page
    assert "| `llama` | fused | equal |  |" in page


def test_broken_row_shows_as_the_tier_below(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = replace(families.LLAMA_LIKE[QWEN3], head_norms=None)
    monkeypatch.setitem(families.FAMILIES, QWEN3, families._llama_like(QWEN3[0], broken))
    assert main(["support", "--types", "qwen3"]) == 0
    tier, result, why = rows_of(capsys.readouterr().out)["qwen3"]
    assert (tier, result) == ("patched", "equal") and why.startswith("self-test: ")


def test_call_that_raises_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: DecoderStep, inputs: object) -> None:
        raise RuntimeError("no kernel for this\nand more")

    monkeypatch.setattr(DecoderStep, "prefill", broken)
    monkeypatch.setattr("torch_paged.generate.session.selftest_reason", lambda *args: "")
    assert main(["support", "--types", "llama", "bart"]) == 1
    out = capsys.readouterr().out
    assert "fails      RuntimeError: no kernel for this" in out and "and more" not in out
    assert out.rstrip().endswith("at fault: llama")


def test_step_that_raises_shows_as_the_tier_below(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: DecoderStep, inputs: object) -> None:
        raise RuntimeError("no kernel for this\nand more")

    monkeypatch.setattr(DecoderStep, "prefill", broken)
    assert main(["support", "--types", "llama"]) == 0
    tier, result, why = rows_of(capsys.readouterr().out)["llama"]
    assert (tier, result) == ("patched", "equal") and "a step raised RuntimeError" in why


def test_wrong_tokens_are_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shifted(logits: torch.Tensor) -> torch.Tensor:
        return logits.roll(1, -1)

    for name in ("prefill", "decode"):
        own = getattr(DecoderStep, name)
        monkeypatch.setattr(DecoderStep, name, lambda self, x, own=own: shifted(own(self, x)))
    monkeypatch.setattr("torch_paged.generate.session.selftest_reason", lambda *args: "")
    assert main(["support", "--types", "llama"]) == 1
    assert "fused    differs    row 0 parts at new token 0" in capsys.readouterr().out


def test_unknown_type_is_told_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["support", "--types", "llama", "lama"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "got lama;" in err


def logits_with_a_tie(step: int) -> torch.Tensor:
    """Return logits [8, 1, 3] whose best is 1, and which are nearly tied at one step."""
    logits = torch.tensor([0.0, 2.0, 1.0]).repeat(8, 1, 1)
    logits[step, 0, 2] = 2.0 - NEAR_TIE / 2
    return logits


@pytest.mark.parametrize("option", ["--json", "--markdown"])
@pytest.mark.parametrize("name", ["none/rows", "."])
def test_file_that_cannot_be_written_is_told_before_anything_runs(
    option: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / name)
    with pytest.raises(SystemExit) as ended:
        main(["support", "--types", "llama", option, path])
    told = capsys.readouterr()
    assert ended.value.code == 2 and told.out == ""
    assert f"argument {option}: must be a file in an existing folder, got {path}" in told.err


def test_tokens_count_up_to_a_near_tie() -> None:
    expected = torch.ones(1, 5 + 8, dtype=torch.long)
    got = expected.clone()
    got[0, 5 + 7] = 2
    assert compare_tokens(got, expected, logits_with_a_tie(7)) == ("equal", "")
    got[0, 5 + 6] = 2
    told = ("differs", "row 0 parts at new token 6")
    assert compare_tokens(got, expected, logits_with_a_tie(7)) == told


def test_early_near_tie_decides_nothing() -> None:
    expected = torch.ones(1, 5 + 8, dtype=torch.long)
    result, why = compare_tokens(expected, expected, logits_with_a_tie(LEAST_COMPARED - 1))
    assert (result, why) == ("undecided", "a near tie decides row 0 at new token 5")
