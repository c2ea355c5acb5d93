from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_paged
from torch_paged import environment
from torch_paged.__main__ import main
from torch_paged.ops.triton_compat import HAS_TRITON

ROOT = Path(__file__).resolve().parents[1]


def test_info_lists_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert listed["torch_paged"] == torch_paged.__version__
    assert listed["torch"] == torch.__version__
    assert listed["python"].startswith(platform.python_version())
    assert "kernels" in listed
    if torch.cuda.is_available():
        assert any(torch.cuda.get_device_name(0) in value for value in listed.values())
    else:
        assert listed["gpu"].startswith("none")


def test_report_is_a_markdown_table_with_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_PAGED_LOG", "a|b")
    assert main(["info", "--report"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["### Environment", "", "| what | value |", "| --- | --- |"]
    assert r"| TORCH_PAGED_LOG | a\|b |" in lines
    assert any(line.startswith("| c compiler | ") for line in lines)
    assert all(line.startswith("| ") and line.endswith(" |") for line in lines[2:])


def test_report_shows_no_path_and_no_unrelated_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/home/jane/cache")
    monkeypatch.setenv("SECRET_KEY", "swordfish")
    main(["info", "--report"])
    text = capsys.readouterr().out
    assert "| TRITON_CACHE_DIR | (a path) |" in text
    assert "jane" not in text and "swordfish" not in text
    assert os.path.expanduser("~") not in text


def test_missing_package_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_REQUIRED", ("no-such-package",))
    assert environment.Row("no-such-package", "not installed") in environment.describe()


def set_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize(
    ("capability", "text"),
    [
        ((7, 0), "none on the GPU: sm_70 is older than sm_75"),
        ((7, 5), "Triton, CUDA graphs, without programmatic dependent launch"),
        ((9, 0), "Triton, CUDA graphs, with programmatic dependent launch"),
    ],
)
def test_kernels_depend_on_the_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], text: str
) -> None:
    set_gpu(monkeypatch, capability)
    monkeypatch.setattr(environment, "HAS_TRITON", True)
    assert environment._kernels() == text


def test_missing_triton_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(environment, "HAS_TRITON", False)
    assert "install triton>=3.6" in environment._kernels()


def test_listing_agrees_with_the_ops_on_triton() -> None:
    assert environment.HAS_TRITON is HAS_TRITON


def test_module_runs_as_a_program() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "torch_paged", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert (result.returncode, result.stdout.strip()) == (0, torch_paged.__version__)


@pytest.mark.parametrize(
    ("called", "usage"),
    [
        ("/venv/bin/torch-paged", "usage: torch-paged "),
        ("C:/venv/Scripts/torch-paged.exe", "usage: torch-paged "),
        ("/somewhere/torch_paged/__main__.py", "usage: python -m torch_paged "),
    ],
)
def test_usage_is_as_it_was_called(
    called: str,
    usage: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [called])
    for arguments in (["--help"], ["info", "--help"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert capsys.readouterr().out.startswith(usage)


def test_no_command_prints_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main([])
    assert raised.value.code == 2
    assert "info" in capsys.readouterr().err
