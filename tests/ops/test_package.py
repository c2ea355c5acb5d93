"""Importing torch_paged.ops, under its name and under its bare one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True
    )


def test_bare_import_names_the_right_package():
    result = _run("import ops", ROOT / "torch_paged")
    assert result.returncode != 0
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError:") and "import torch_paged.ops" in last_line


def test_package_itself_imports_nothing():
    # Executed apart from its parent, which may import what it likes.
    program = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('torch_paged.ops', 'ops/__init__.py')\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        "loaded = {'torch', 'triton', 'torch_paged'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    result = _run(program, ROOT / "torch_paged")
    assert result.returncode == 0, result.stderr
