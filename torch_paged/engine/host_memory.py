"""How much memory this machine, or the container around the process, has to spare."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_FILES = (
    # limit, in use, and the name of what the kernel can take back in memory.stat
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the bytes that can be taken without swapping; None where nothing tells.

    Where only the size of the memory is known, that is returned.
    """
    found = [_machine(proc), *(_container(cgroup, *names) for names in _CGROUP_FILES)]
    known = [number for number in found if number is not None]
    return max(min(known), 0) if known else None


def _machine(proc: Path) -> int | None:
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return _physical()


def _physical() -> int | None:
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container(cgroup: Path, limit: str, used: str, reclaimable: str) -> int | None:
    try:
        most = int((cgroup / limit).read_text())
        taken = int((cgroup / used).read_text())
        for line in (cgroup / limit).with_name("memory.stat").read_text().splitlines():
            if line.startswith(f"{reclaimable} "):
                taken -= int(line.split()[1])
    except (OSError, ValueError):  # no such file, or "max"
        return None
    return most - taken


__all__ = ["available_bytes"]
