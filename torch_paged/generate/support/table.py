"""The table of types as text, JSON and Markdown."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from torch_paged.generate.support.parity import NEW_TOKENS, PROMPTS, Row

_TIERS = ("fused", "patched", "eager")
_WIDTH = 99


def format_row(row: Row, width: int) -> str:
    """Write one line; a long reason goes on below itself."""
    head = f"{row.model_type:<{width}}  {row.tier:<7}  {row.result:<9}"
    indent = " " * (len(head) + 2)
    width = max(_WIDTH - len(indent), 24)
    why = textwrap.wrap(row.why, width, break_long_words=False) or [""]
    lines = [f"{head}  {why[0]}".rstrip(), *(indent + line for line in why[1:])]
    return "\n".join(lines)


def format_counts(rows: Sequence[Row]) -> str:
    """Say how many types run in each tier, and how many are not as they should be."""
    tiers = Counter[str](row.tier for row in rows)
    parts = [f"{tiers[tier]} {tier}" for tier in _TIERS]
    not_built = sum(row.result == "not built" for row in rows)
    if not_built:
        parts.append(f"{not_built} not built")
    faults = [row.model_type for row in rows if row.is_fault]
    text = f"{len(rows)} types: {', '.join(parts)}"
    return text + (f"; at fault: {', '.join(faults)}" if faults else "; all that ran are equal")


def format_json(rows: Sequence[Row], versions: Mapping[str, str]) -> str:
    """Write versions and rows."""
    return json.dumps(
        {"versions": dict(versions), "rows": [asdict(row) for row in rows]}, indent=1
    )


def format_markdown(rows: Sequence[Row], versions: Mapping[str, str], command: str) -> str:
    """Write the page docs/support.md."""
    where = ", ".join(f"{name} {version}" for name, version in versions.items())
    prompts = ", ".join(map(str, PROMPTS))
    paragraphs = [
        f"Made by `{command}` with {where}. Run it for the versions that you have.",
        "It builds each causal-LM type that transformers knows with a tiny random config, and "
        f"compares what it generates with and without torch_paged: greedily, {NEW_TOKENS} tokens "
        f"for a left-padded batch of {len(PROMPTS)} prompts ({prompts} tokens), in float32, "
        "against Hugging Face's eager attention.",
        "A type is a `model_type` of transformers. Settings of a config can move a model to a "
        "lower tier; `torch_paged.explain(model)` says so for the model that you hold.",
    ]
    made, compared, settings = ("\n".join(textwrap.wrap(p, _WIDTH)) for p in paragraphs)
    lines = [
        "# Supported models",
        "",
        made,
        "",
        compared,
        "",
        "- **fused**: whole decode steps of ours over the model's own parameters;",
        "- **patched**: the model's own forward with attention switched to the paged cache;",
        "- **eager**: Hugging Face's own code, for the reason given, and so equal in any case.",
        "",
        settings,
        "",
        f"{format_counts(rows)}.",
        "",
        "| type | tier | result | reason |",
        "| --- | --- | --- | --- |",
    ]
    for row in rows:
        why = row.why.replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| `{row.model_type}` | {row.tier} | {row.result} | {why} |")
    return "\n".join(lines) + "\n"


__all__ = ["format_counts", "format_json", "format_markdown", "format_row"]
