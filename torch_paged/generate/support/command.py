"""The command ``support``: the table of every causal-LM type."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from torch_paged._version import __version__
from torch_paged.generate.support.parity import Row, row_of
from torch_paged.generate.support.table import (
    format_counts,
    format_json,
    format_markdown,
    format_row,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="only these model types")
    parser.add_argument("--json", type=_file, metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--markdown", type=_file, metavar="FILE", help="also write a page of docs")


def run(arguments: argparse.Namespace) -> int:
    """Compare each type and print its row; 1 if any differs or fails, 2 for an unknown type."""
    known = list(dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    unknown = [name for name in arguments.types or () if name not in known]
    if unknown:
        print(
            f"--types must name causal-LM types of transformers {transformers.__version__}, got "
            f"{', '.join(unknown)}; leave --types out for all of them",
            file=sys.stderr,
        )
        return 2
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = compare_types(arguments.types or sorted(known), device)
    print(format_counts(rows))
    versions = _versions(device)
    if arguments.json is not None:
        arguments.json.write_text(format_json(rows, versions) + "\n", encoding="utf-8")
    if arguments.markdown is not None:
        text = format_markdown(rows, versions, _command(arguments))
        arguments.markdown.write_text(text, encoding="utf-8")
    return int(any(row.is_fault for row in rows))


def compare_types(names: Sequence[str], device: str) -> list[Row]:
    """Compare the types one by one, printing each row as soon as it is there."""
    # Default configs warn about their token ids by the page.
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    rows = []
    try:
        for name in names:
            rows.append(row_of(name, device))
            print(format_row(rows[-1], max(map(len, names))), flush=True)
    finally:
        transformers.logging.set_verbosity(before)
    return rows


def _file(text: str) -> Path:
    """Return a path that can be written to: the table takes minutes to make."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in an existing folder, got {text}")
    return path


def _versions(device: str) -> Mapping[str, str]:
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {
        "torch_paged": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
        "Python": f"{platform.python_version()} on {where}",
    }


def _command(arguments: argparse.Namespace) -> str:
    types = f" --types {' '.join(arguments.types)}" if arguments.types else ""
    return f"python -m torch_paged support{types} --markdown {arguments.markdown.as_posix()}"


__all__ = ["add_arguments", "run"]
