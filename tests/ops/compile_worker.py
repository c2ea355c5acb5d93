"""Compiles a share of the compile targets; run in its own process, without TRITON_INTERPRET.

    python compile_worker.py OUT JOB...        JOB = row index ":" capability

Writes one JSON object a job to OUT.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from targets import OPS, Target, collect

sys.path.insert(0, str(OPS.parents[1]))

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
    return {
        "shared": compiled.metadata.shared,
        "registers": registers,
        "stack": stack,
        "gdc_wait": "griddepcontrol.wait" in ptx,
        "gdc_launch_dependents": "griddepcontrol.launch_dependents" in ptx,
    }


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and stack bytes a thread; spilled registers live in the stack frame."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    usage = re.findall(r"REG:(\d+) STACK:(\d+)", report)
    return max(int(r) for r, _ in usage), max(int(s) for _, s in usage)


def main(out: str, jobs: list[str]) -> None:
    """Compile the jobs and write their results; an error is a result too."""
    rows = collect()
    with Path(out).open("w") as file:
        for job in jobs:
            index, capability = (int(part) for part in job.split(":"))
            result: dict[str, Any] = {"id": rows[index].id, "capability": capability}
            try:
                result |= compile_target(rows[index], capability)
            except Exception:
                result["error"] = traceback.format_exc()[-3000:]
            file.write(json.dumps(result) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
