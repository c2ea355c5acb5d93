"""Imports point one way, and importing the package is light and portable."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torch_paged"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# These may import every layer.
FRONT_DOORS = {"torch_paged", "torch_paged.__main__"}
# Leaf modules at the top of the package, which every layer may use.
LEAVES = {"_version", "config", "driver", "errors", "log", "report"}
# Layer -> the other layers that it may import.
ALLOWED = {
    "ops": set(),
    "cache": {"ops"},
    "graphs": set(),
    "decoder": {"ops", "cache"},
    "patches": {"ops", "cache", "decoder"},
    "engine": {"ops", "cache", "decoder", "graphs"},
    "generate": {"ops", "cache", "decoder", "graphs", "engine", "patches"},
}
# Layer -> packages from outside the standard library; "" is the top of the package.
THIRD_PARTY = {
    "": {"torch"},
    "ops": {"torch", "triton"},
    "cache": {"torch", "cuda"},
    "graphs": {"torch"},
    "decoder": {"torch", "numpy"},
    "engine": {"torch", "numpy"},
    "patches": {"torch", "transformers", "accelerate", "peft"},
    "generate": {"torch", "transformers", "accelerate", "peft"},
}
PURE_PYTHON = [
    "torch_paged.cache.blocks",
    "torch_paged.cache.layout",
    "torch_paged.cache.prefix",
    "torch_paged.config",
    "torch_paged.engine.held_blocks",
    "torch_paged.engine.request",
    "torch_paged.engine.row_blocks",
    "torch_paged.engine.scheduler",
    "torch_paged.errors",
    "torch_paged.graphs.buckets",
    "torch_paged.report",
]


def imports_of(name: str) -> Iterator[str]:
    """Yield the full names that a module imports, at its top or inside functions."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in MODULES else base
        elif isinstance(node, ast.Call) and node.args:
            function = ast.unparse(node.func)
            target = node.args[0]
            if function.endswith(("import_module", "__import__")) and isinstance(
                target, ast.Constant
            ):
                yield str(target.value)


def layer_of(name: str) -> str:
    """Return the layer of one of our modules: "" for those at the top of the package."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else ""


@pytest.mark.parametrize("name", sorted(MODULES.keys() - FRONT_DOORS))
def test_module_imports_only_lower_layers(name: str) -> None:
    layer = layer_of(name)
    for target in imports_of(name):
        if target.split(".")[0] != "torch_paged":
            continue
        other = layer_of(target)
        if other:
            # The environment listing asks the ops whether triton is there, and nothing else.
            if (name, target) == ("torch_paged.environment", "torch_paged.ops.triton_compat"):
                continue
            assert other == layer or other in ALLOWED.get(layer, set()), f"{name} -> {target}"
        else:
            assert target.removeprefix("torch_paged.") in LEAVES, f"{name} -> {target}"


@pytest.mark.parametrize("name", MODULES)
def test_module_imports_only_the_third_parties_of_its_layer(name: str) -> None:
    for target in imports_of(name):
        package = target.split(".")[0]
        if package != "torch_paged" and package not in sys.stdlib_module_names:
            assert package in THIRD_PARTY[layer_of(name)], f"{name} -> {target}"


@pytest.mark.parametrize("name", PURE_PYTHON)
def test_bookkeeping_module_reaches_no_torch(name: str) -> None:
    waiting, seen = [name], set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        for target in imports_of(module):
            assert target.split(".")[0] not in ("torch", "transformers"), f"{module} -> {target}"
            if target in MODULES:
                waiting.append(target)


@pytest.mark.parametrize("name", MODULES)
def test_function_is_fully_annotated_unless_it_is_a_kernel(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    methods = {
        child for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in node.body
    }
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if any("triton." in ast.unparse(d) for d in node.decorator_list):
            continue
        where = f"{name}:{node.lineno} {node.name}"
        positional = node.args.posonlyargs + node.args.args
        static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
        if node in methods and not static:
            positional = positional[1:]
        rest = [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
        for argument in [*positional, *node.args.kwonlyargs, *rest]:
            assert argument.annotation is not None, f"{where}({argument.arg})"
        assert node.returns is not None, f"{where} has no return annotation"


@pytest.mark.parametrize("folder", ["ops", "graphs", "patches"])
def test_top_level_link_points_into_the_package(folder: str) -> None:
    link = ROOT / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"torch_paged/{folder}"
    assert link.resolve() == PACKAGE / folder


@pytest.mark.parametrize("folder", ["ops", "graphs", "patches"])
def test_import_under_the_bare_name_names_the_right_one(folder: str) -> None:
    result = run_python(f"import {folder}")
    assert result.returncode != 0
    assert "ImportError" in result.stderr
    assert f"torch_paged.{folder}" in result.stderr


def test_import_leaves_cuda_uninitialised() -> None:
    script = """
import torch
def refuse(*args, **kwargs):
    raise AssertionError("importing torch_paged initialised CUDA")
torch.cuda._lazy_init = torch.cuda.init = refuse
import importlib, pkgutil, torch_paged
for module in pkgutil.walk_packages(torch_paged.__path__, "torch_paged."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from torch_paged.graphs.capture import GraphCache
from torch_paged.graphs.pool import GraphPool
GraphCache(GraphPool("cuda"))
assert not torch.cuda.is_initialized()
import sys
assert "cuda.bindings" not in sys.modules
print("imported")
"""
    result = run_python(script)
    assert result.stdout.strip() == "imported", result.stderr


def test_package_works_without_triton() -> None:
    script = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
import importlib, pkgutil, torch, torch_paged
for module in pkgutil.walk_packages(torch_paged.__path__, "torch_paged."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from torch_paged.ops.rms_norm import rms_norm
from torch_paged.ops.triton_compat import HAS_TRITON
assert not HAS_TRITON and not any(name.split(".")[0] == "triton" for name in sys.modules)
x = torch.tensor([[3.0, 4.0]])
y = rms_norm(x, None, eps=0.0)
torch.testing.assert_close(y, x / 12.5**0.5)
print("normalised")
"""
    result = run_python(script)
    assert result.stdout.strip() == "normalised", result.stderr


def test_files_without_transformers_are_told_by_what_they_import() -> None:
    spec = importlib.util.spec_from_file_location("tests_conftest", ROOT / "tests/conftest.py")
    assert spec is not None and spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    without = {layer for layer, packages in THIRD_PARTY.items() if "transformers" not in packages}
    assert conftest._WITHOUT_TRANSFORMERS == without - {""}
    reaches = {
        name: conftest.reaches_transformers(ROOT / "tests" / name)
        for name in (
            "engine/test_scheduler_traces.py",
            "ops/test_compile_targets.py",
            "ops/test_paged_attention_decode.py",  # by way of paged_attention_case.py
            "engine/test_engine.py",  # torch_paged itself
            "ops/test_rms_norm.py",  # compares with transformers' norms
            "ops/test_rotary_cache_write.py",  # rotary_cache_write_case.py does
            "test_layering.py",
        )
    }
    assert list(reaches.values()) == [False] * 3 + [True] * 4, reaches


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter at the root of the repository."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
