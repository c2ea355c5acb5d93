"""What is shipped is what the repository holds."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import torch_paged

ROOT = Path(__file__).resolve().parents[1]


def repository_files() -> list[str]:
    """List the files of the working tree that git tracks or would track."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout to compare with")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    return [
        name for name in listed if name and (ROOT / name).is_symlink() | (ROOT / name).is_file()
    ]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[zipfile.ZipFile, tarfile.TarFile]:
    """Build the sdist from a copy of the repository, and the wheel from that sdist."""
    source = tmp_path_factory.mktemp("source")
    for name in repository_files():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    output = tmp_path_factory.mktemp("dist")
    result = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(source)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = output.glob("*.whl")
    (sdist,) = output.glob("*.tar.gz")
    return zipfile.ZipFile(wheel), tarfile.open(sdist)


def test_wheel_holds_exactly_the_package(
    built: tuple[zipfile.ZipFile, tarfile.TarFile],
) -> None:
    shipped = [name for name in built[0].namelist() if ".dist-info/" not in name]
    held = [name for name in repository_files() if name.startswith("torch_paged/")]
    assert len(held) > 20
    assert sorted(shipped) == sorted(held)
    assert "torch_paged/py.typed" in shipped


def test_wheel_carries_licence_and_metadata(
    built: tuple[zipfile.ZipFile, tarfile.TarFile],
) -> None:
    wheel = built[0]
    info = f"torch_paged-{torch_paged.__version__}.dist-info"
    licence = wheel.read(f"{info}/licenses/LICENSE").decode()
    assert licence == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in licence and "END OF TERMS AND CONDITIONS" in licence
    metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert metadata["Name"] == "torch-paged"
    assert metadata["Version"] == torch_paged.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    required = metadata.get_all("Requires-Dist") or []
    assert {"torch>=2.11", "transformers<6,>=5.17"} <= set(required)
    triton = [line for line in required if line.startswith("triton")]
    assert triton == ['triton>=3.6; sys_platform == "linux" and platform_machine == "x86_64"']


def test_wheel_is_pure_python(built: tuple[zipfile.ZipFile, tarfile.TarFile]) -> None:
    assert Path(str(built[0].filename)).name.endswith("-py3-none-any.whl")


def test_sdist_holds_the_package_and_what_describes_it(
    built: tuple[zipfile.ZipFile, tarfile.TarFile],
) -> None:
    names = {name.partition("/")[2] for name in built[1].getnames()}
    held = {name for name in repository_files() if name.startswith("torch_paged/")}
    assert held <= names
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"} <= names
    # tests/benchmarks imports it.
    assert "benchmarks/report.py" in names
    # The links at the top level would double every module.
    assert not any(name.split("/")[0] in ("ops", "graphs", "patches") for name in names)
