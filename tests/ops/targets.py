"""Rows of the compile check: every kernel of torch_paged.ops with arguments to compile it for.

A row goes into ``targets_<name>.py`` beside this file::

    from targets import Target

    TARGETS = [
        Target("glu:_glu_kernel", constants={"ACTIVATION": "silu", "HAS_UP": True, "BLOCK": 1024}),
    ]

Arguments that a row does not name are typed by their name: ``*_ptr`` points to the half dtype of
the device (fp16 on sm_75, bf16 above), ``stride_*`` is an i32 divisible by 16, others are i32.
``PDL`` is set by the device. The first row of a kernel compiles for all devices, further ones for
some of them, to keep the check short. Nothing here imports torch or triton.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

OPS = Path(__file__).parents[2] / "torch_paged" / "ops"

#: Shared memory that one program may take, in bytes, by compute capability.
SHARED_LIMITS = {75: 64 << 10, 80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}

#: The device that the kernels are tuned on.
TUNED_FOR = 90
#: How many rows of a kernel compile for a device, if not one: all for that one, two for that with
#: the least shared memory that has asynchronous copies.
_MOST_ROWS = {89: 2, TUNED_FOR: sys.maxsize}


@dataclass(frozen=True, slots=True)
class Target:
    """One kernel with one set of compile-time arguments.

    Args:
        kernel: ``"module:function"``, the module relative to torch_paged.ops.
        constants: values of constexpr arguments, and of others that launch as 1 or None.
        types: Triton types of arguments that the naming rule gets wrong, e.g. ``"*fp32"``,
            ``"i64"``, ``"fp32"``, ``"i32:16"`` (divisible by 16), ``"*half"``.
        num_warps: as launched.
        num_stages: as launched.
        options: further launch options, e.g. ``{"maxnreg": 128}``.
        hot: runs in every decode step: must not spill registers.
        aligned: pointers and strides are divisible by 16.
        capabilities: devices that it launches on.
        label: tells rows of one kernel apart.
    """

    kernel: str
    constants: Mapping[str, object] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, object] = field(default_factory=dict)
    hot: bool = False
    aligned: bool = True
    capabilities: tuple[int, ...] = tuple(SHARED_LIMITS)
    label: str = ""

    @property
    def id(self) -> str:
        """Name of the row in reports."""
        return f"{self.kernel}-{self.label}" if self.label else self.kernel

    @property
    def adds_lanes(self) -> bool:
        """Say whether its sums go through shared memory, where all lanes write them."""
        return self.hot and self.kernel.startswith("fused_linear")

    def signature(self, arg_names: list[str], capability: int) -> dict[str, str]:
        """Return the Triton type of each argument, ``":16"`` marking divisibility by 16."""
        half = "fp16" if capability < 80 else "bf16"
        aligned = ":16" if self.aligned else ""
        signature = {}
        for name in arg_names:
            if name in self.constants or name == "PDL":
                signature[name] = "constexpr"
            elif name.endswith("_ptr"):
                signature[name] = self.types.get(name, "*half").replace("half", half) + aligned
            else:
                default = "i32" + aligned if name.startswith("stride_") else "i32"
                signature[name] = self.types.get(name, default).replace("half", half)
        return signature


def collect() -> list[Target]:
    """Return the rows of all ``targets_*.py`` files with the devices to compile each for.

    Rows without any are left out.
    """
    files = sorted(Path(__file__).parent.glob("targets_*.py"))
    rows = [row for file in files for row in importlib.import_module(file.stem).TARGETS]
    taken: Counter[tuple[str, int]] = Counter()
    for index, row in enumerate(rows):
        kept = tuple(
            capability
            for capability in row.capabilities
            if taken[row.kernel, capability] < _MOST_ROWS.get(capability, 1)
        )
        taken.update((row.kernel, capability) for capability in kept)
        rows[index] = replace(row, capabilities=kept)
    return [row for row in rows if row.capabilities]


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(OPS.rglob("*.py")):
        parts = file.relative_to(OPS).with_suffix("").parts
        yield (
            ".".join(parts[:-1] if parts[-1] == "__init__" else parts),
            ast.parse(file.read_text()),
        )


def _is_jitted(function: ast.FunctionDef) -> bool:
    decorators = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
    return any(isinstance(d, ast.Attribute) and d.attr == "jit" for d in decorators)


def find_kernels() -> set[str]:
    """Return ``"module:function"`` of each kernel, a jitted function named ``*_kernel``."""
    return {
        f"{module}:{node.name}"
        for module, tree in _modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and _is_jitted(node) and node.name.endswith("_kernel")
    }


def find_misnamed_kernels() -> set[str]:
    """Return jitted functions that are launched, ``name[grid](...)``, under another name."""
    trees = list(_modules())
    jitted = {
        node.name
        for _, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and _is_jitted(node)
    }
    launched = {
        node.func.value.id
        for _, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
    }
    return {name for name in jitted & launched if not name.endswith("_kernel")}
