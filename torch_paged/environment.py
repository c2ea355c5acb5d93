"""What torch_paged runs on: versions, devices and settings, for `info` and for bug reports."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass

import torch

from torch_paged._version import __version__
from torch_paged.ops.triton_compat import HAS_TRITON
from torch_paged.report import format_bytes

_REQUIRED = ("torch", "triton", "transformers", "accelerate", "safetensors")
# Packages that change how a model is held or run.
_RELATED = (
    "peft",
    "trl",
    "bitsandbytes",
    "torchao",
    "kernels",
    "flash-attn",
    "deepspeed",
    "gguf",
    "huggingface-hub",
    "tokenizers",
    "numpy",
)
_VARIABLE_PREFIXES = ("TORCH_PAGED_", "TRITON_", "PYTORCH_", "CUDA_", "OMP_", "NVIDIA_TF32")
_OLDEST_CAPABILITY = (7, 5)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the listing."""

    label: str
    value: str


def describe(*, full: bool = False) -> list[Row]:
    """List versions, devices and kernels; with `full` also related packages and variables.

    Initialises CUDA where there is a GPU. Nothing listed names the user, a path or the host.
    """
    rows = [
        Row("torch_paged", __version__),
        Row("python", f"{platform.python_version()} ({platform.python_implementation()})"),
        Row("platform", f"{platform.system()} {platform.release()} {platform.machine()}"),
    ]
    rows += [Row(name, _version(name) or "not installed") for name in _REQUIRED]
    rows += [
        Row("cpu", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"),
        *_devices(),
        Row("kernels", _kernels()),
    ]
    if full:
        rows += [Row("torch build", _torch_build())]
        rows += [Row(name, version) for name in _RELATED if (version := _version(name))]
        rows += [Row("c compiler", _compiler())]
        rows += [
            # A path may hold the user's name: that it is set is enough to know.
            Row(name, "(a path)" if os.sep in os.environ[name] else os.environ[name])
            for name in sorted(os.environ)
            if name.startswith(_VARIABLE_PREFIXES)
        ]
    return rows


def format_text(rows: list[Row]) -> str:
    """Align the rows in two columns."""
    width = max(len(row.label) for row in rows) + 2
    return "\n".join(f"{row.label:<{width}}{row.value}" for row in rows)


def format_markdown(rows: list[Row]) -> str:
    """Write the rows as a table to paste into a bug report."""
    lines = ["### Environment", "", "| what | value |", "| --- | --- |"]
    cells = [(row.label, row.value.replace("|", "\\|")) for row in rows]
    return "\n".join(lines + [f"| {label} | {value} |" for label, value in cells])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[Row]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "torch sees no device" if built else "this torch is a CPU build"
        return [Row("gpu", f"none ({why})")]
    rows = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows.append(
            Row(
                f"gpu {index}",
                f"{properties.name}, sm_{properties.major}{properties.minor}, "
                f"{format_bytes(properties.total_memory)}, "
                f"{properties.multi_processor_count} multiprocessors",
            )
        )
    return rows


def _kernels() -> str:
    """Say which kernels an accelerated model would run here, and why."""
    if not torch.cuda.is_available():
        return "plain torch on the CPU; no CUDA graphs"
    if not HAS_TRITON:
        return "none on the GPU: triton is not installed; install triton>=3.6"
    capability = torch.cuda.get_device_capability()
    if capability < _OLDEST_CAPABILITY:
        return f"none on the GPU: sm_{capability[0]}{capability[1]} is older than sm_75"
    launch = "with" if capability >= (9, 0) else "without"
    return f"Triton, CUDA graphs, {launch} programmatic dependent launch"


def _torch_build() -> str:
    parts = [f"CUDA {torch.version.cuda}"] if torch.version.cuda else []
    if torch.version.hip:
        parts.append(f"HIP {torch.version.hip}")
    if torch.backends.cudnn.is_available():
        parts.append(f"cuDNN {torch.backends.cudnn.version()}")
    parts.append(f"{torch.backends.cpu.get_cpu_capability()} on the CPU")
    return ", ".join(parts)


def _compiler() -> str:
    """Name the C compiler that triton would find: without one it cannot launch a kernel."""
    asked = os.environ.get("CC")
    found = [name for name in (asked, "gcc", "clang") if name and shutil.which(name)]
    return os.path.basename(found[0]) if found else "none found (triton needs gcc or clang)"


__all__ = ["Row", "describe", "format_markdown", "format_text"]
