"""Shared test set-up: kernels run interpreted where no GPU is present."""

import ast
import gc
import os
from pathlib import Path

import pytest
import torch

# Before anything imports triton: without a GPU the launchers run under the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

_HERE = Path(__file__).parent
# tests/test_layering.py holds that these layers import neither transformers nor a layer that does.
_WITHOUT_TRANSFORMERS = {"ops", "cache", "graphs", "decoder", "engine"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--with-transformers-only",
        action="store_true",
        help="leave out the files in which no other version of transformers can matter",
    )
    parser.addoption(
        "--every-device",
        action="store_true",
        help="compile all forms of the kernels, for all devices, and not the first ones for one",
    )


def pytest_collection_finish() -> None:
    """Spare each garbage collection the modules and the tests, millions of objects that stay."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("with_transformers_only") or collection_path.suffix != ".py":
        return None
    return True if not reaches_transformers(collection_path) else None


def reaches_transformers(path: Path) -> bool:
    """Say whether a file of the tests, or one beside it that it imports, knows transformers."""
    if path.parent in (_HERE, _HERE / "benchmarks"):
        return True  # whole programs
    waiting, seen = [path], set()
    while waiting:
        seen.add(file := waiting.pop())
        text = file.read_text(encoding="utf-8")
        # In any way: it may stand in a program that another process runs.
        if "transformers" in text:
            return True
        for name in _imports(ast.parse(text)):
            package, _, rest = name.partition(".")
            if package == "torch_paged" and rest.partition(".")[0] not in _WITHOUT_TRANSFORMERS:
                return True
            for folder in (file.parent, _HERE):
                if (local := folder / f"{package}.py").is_file() and local not in seen:
                    waiting.append(local)
    return False


def _imports(tree: ast.Module) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names
