"""A plan as text for people: layers that do the same are printed once."""

from __future__ import annotations

import re

from torch_paged.decoder.plan import Plan

_LAYER = re.compile(r"(\d+)$")


def fold_layers(plan: Plan) -> str:
    """Print `plan` with runs of equal layers folded to one; `i` stands for the layer's index."""
    sections: list[tuple[int | None, list[str]]] = []
    for instruction in plan.instructions:
        index = _layer_of(instruction.targets[0])
        if not sections or sections[-1][0] != index:
            sections.append((index, []))
        sections[-1][1].append(str(instruction))
    out: list[str] = []
    position = 0
    while position < len(sections):
        index, lines = sections[position]
        if index is None:
            out += lines
            position += 1
            continue
        shape, last = _shape(index, lines), position
        while last + 1 < len(sections) and _same(sections[last + 1], shape):
            last += 1
        until = sections[last][0]
        out.append(f"layer {index}:" if last == position else f"layers i = {index} to {until}:")
        out += [f"  {line}" for line in (lines if last == position else shape)]
        position = last + 1
    return "\n".join(out)


def _layer_of(target: str) -> int | None:
    match = _LAYER.search(target)
    # The rotary tables are numbered too, but belong to no layer.
    return int(match.group(1)) if match and not target.startswith(("cos", "sin")) else None


def _same(section: tuple[int | None, list[str]], shape: list[str]) -> bool:
    index, lines = section
    return index is not None and _shape(index, lines) == shape


def _shape(index: int, lines: list[str]) -> list[str]:
    """Name the layer's own index i, and that of the layer before i-1."""
    names = {str(index): "i", str(index - 1): "i-1"}

    def value(match: re.Match[str]) -> str:
        name, number = match.groups()
        known = name not in ("cos", "sin") and number in names
        return f"{name}[{names[number]}]" if known else match.group()

    out = []
    for line in lines:
        line = re.sub(rf"(?<=\.){index}(?=[.\]])", "i", line)
        line = line.replace(f"attention[{index}:", "attention[i:")
        out.append(re.sub(r"\b([a-z]+)(\d+)\b", value, line))
    return out
