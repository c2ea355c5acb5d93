"""Every field of GenerationConfig has been decided on, and the documentation says how."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GenerationConfig

from torch_paged.generate.fields import FIELDS, MEANINGS, markdown_table

PAGE = Path(__file__).resolve().parents[2] / "docs/generate.md"


def test_every_field_of_the_installed_release_is_decided_on() -> None:
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert names - FIELDS.keys() == set()
    assert FIELDS.keys() - names == set(), "a field that no supported release has"


@pytest.mark.parametrize("name", FIELDS)
def test_a_fallback_says_why(name) -> None:
    field = FIELDS[name]
    assert field.handling in MEANINGS
    assert field.handling != "falls back" or field.note


def test_page_has_the_table_and_its_terms() -> None:
    page = PAGE.read_text("utf-8")
    assert markdown_table() in page
    for handling, meaning in MEANINGS.items():
        assert f"* *{handling}*: {meaning}" in page
