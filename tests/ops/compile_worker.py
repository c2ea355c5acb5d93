"""Compiles compile targets on demand; run in its own process, without TRITON_INTERPRET.

Reads jobs ``"<row index> <capability>"`` from stdin, a line each, and answers each with a line of
JSON on stdout.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import types
from typing import Any

from targets import OPS, Target, collect

# Kernels compile apart from the layers above them: without running torch_paged/__init__.py, which
# takes longer to import than most kernels take to compile.
sys.modules["torch_paged"] = types.ModuleType("torch_paged")
sys.modules["torch_paged"].__path__ = [str(OPS.parent)]

import triton  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402


def compile_target(target: Target, capability: int) -> dict[str, Any]:
    """Compile one row down to machine code and return what it takes of the device."""
    module, name = target.kernel.split(":")
    kernel = getattr(importlib.import_module(f"torch_paged.ops.{module}"), name)
    typed = target.signature(kernel.arg_names, capability)
    unknown = set(target.constants).union(target.types) - set(kernel.arg_names)
    if unknown:
        raise ValueError(f"{target.id} names arguments that the kernel lacks: {sorted(unknown)}")
    if "PDL" not in kernel.arg_names:
        raise ValueError(f"{target.kernel} has no argument PDL")
    pdl = capability >= 90
    source = ASTSource(
        kernel,
        signature={arg: kind.removesuffix(":16") for arg, kind in typed.items()},
        constexprs={**target.constants, "PDL": pdl},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, arg in enumerate(kernel.arg_names)
            if typed[arg].endswith(":16")
        },
    )
    options = {"num_warps": target.num_warps, "num_stages": target.num_stages, **target.options}
    if pdl:
        options["launch_pdl"] = True
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack = _resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    # Reading the machine code takes as long as compiling a small kernel.
    needs_sums = target.adds_lanes and capability == 90 and "shfl.sync.bfly" in ptx
    return {
        "shared": compiled.metadata.shared,
        "registers": registers,
        "stack": stack,
        "gdc_wait": "griddepcontrol.wait" in ptx,
        "gdc_launch_dependents": "griddepcontrol.launch_dependents" in ptx,
        "unequal_sums": _unequal_sums(compiled.asm["cubin"]) if needs_sums else 0,
    }


def _cuobjdump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [knobs.nvidia.cuobjdump.path, option, file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout


def _unequal_sums(cubin: bytes) -> int:
    """Count the values of other lanes that are added to a product which is not rounded first.

    The other lane adds this one's product, which is rounded: lanes that should hold one sum differ
    in its last bit, and which of them is stored is left to chance.
    """
    code = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(.*?);", _cuobjdump(cubin, "-sass"), re.MULTILINE)
    count = 0
    for place, line in enumerate(code):
        if (shuffle := re.search(r"SHFL\.BFLY \w+, (R\d+),", line)) is None:
            continue
        for later in code[place + 1 : place + 80]:
            operands = re.findall(r"\bR\d+\b", later)
            if shuffle[1] in operands[1:]:
                count += "FFMA" in later and operands[-1] == shuffle[1]
                break
            if operands and operands[0] == shuffle[1]:
                break
    return count


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and stack bytes a thread; spilled registers live in the stack frame."""
    report = _cuobjdump(cubin, "-res-usage")
    usage = re.findall(r"REG:(\d+) STACK:(\d+)", report)
    return max(int(r) for r, _ in usage), max(int(s) for _, s in usage)


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    """Answer jobs until stdin ends; an error is an answer too."""
    answers = os.fdopen(os.dup(1), "w")
    # Whatever compilers print must not end up between the answers.
    os.dup2(2, 1)
    rows = collect()
    for line in sys.stdin:
        index, capability = (int(part) for part in line.split())
        answer: dict[str, Any] = {"id": rows[index].id, "capability": capability}
        start = _cpu_seconds()
        try:
            answer |= compile_target(rows[index], capability)
        except Exception:
            answer["error"] = traceback.format_exc()[-3000:]
        answer["seconds"] = _cpu_seconds() - start
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
