"""A share of the memory of a machine without a GPU, as it is and inside a container."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import pytest

import torch_paged
from torch_paged.engine import core as core_module
from torch_paged.engine import host_memory, pool_limit
from torch_paged.engine.host_memory import available_bytes
from torch_paged.errors import OutOfBlocks

sys.path.append(str(Path(__file__).parent))

from serving_case import core_of, ids_of, make_engine, small_model  # noqa: E402


def test_this_machine_has_memory_and_not_more_than_it_has() -> None:
    available = available_bytes()
    assert available is not None
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available <= physical


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_smallest_limit_counts(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, meminfo="MemTotal:  900 kB\nMemFree: 1 kB\nMemAvailable:    800 kB\n")
    assert available_bytes(proc, cgroup) == 800 << 10
    write(cgroup, memory__max="max\n", memory__current="5\n", memory__stat="inactive_file 1\n")
    assert available_bytes(proc, cgroup) == 800 << 10
    stat = "anon 3\ninactive_file 1000\nactive_file 7\n"
    write(cgroup, memory__max="600000\n", memory__current="5000\n", memory__stat=stat)
    assert available_bytes(proc, cgroup) == 600000 - 5000 + 1000
    write(cgroup, memory__max="4000\n")
    assert available_bytes(proc, cgroup) == 0


def test_older_containers_count_too(tmp_path: Path) -> None:
    proc, memory = tmp_path / "proc", tmp_path / "cgroup" / "memory"
    write(proc, meminfo="MemAvailable:    800 kB\n")
    write(memory, memory__limit_in_bytes="70000", memory__usage_in_bytes="60000")
    write(memory, memory__stat="inactive_file 1\ntotal_inactive_file 500\n")
    assert available_bytes(proc, tmp_path / "cgroup") == 10500


def test_a_machine_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.os, "sysconf_names", {}, raising=False)
    assert available_bytes(tmp_path, tmp_path) is None


def test_a_fraction_limits_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(small_model(), kv_cache_memory=0.25) as engine:
        core = core_of(engine)
        # Room for four blocks in a quarter: 64 tokens.
        size = 2 * 2 * 16 * 16 * 4
        monkeypatch.setattr(pool_limit, "available_bytes", lambda: 4 * (4 * size + 10))
        monkeypatch.setattr(pool_limit, "MIN_CACHE_BYTES", size)
        core.release()
        core.prepare(1, 1, 1)
        assert core.pool.block_bytes == size and core.pool.max_num_blocks() == 4
        engine.add_request(ids_of(40, 1), max_new_tokens=40, request_id="large")
        engine.add_request(ids_of(40, 1), max_new_tokens=8, request_id="small")
        outputs = engine.run()
    assert outputs["large"].finish_reason == "error"
    assert "raise kv_cache_memory" in (outputs["large"].error or "")
    assert outputs["small"].finish_reason == "length"


def test_a_fraction_that_comes_to_nothing_is_refused() -> None:
    model = copy.deepcopy(small_model())
    with pytest.raises(ValueError, match=r"=1e-12 comes to \d bytes.*1048576 are needed; pass a"):
        torch_paged.Engine(model, kv_cache_memory=1e-12)
    assert not torch_paged.is_accelerated(model)


def test_a_fraction_of_an_unknown_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_limit, "available_bytes", lambda: None)
    model = copy.deepcopy(small_model())
    with pytest.raises(ValueError, match=r"kv_cache_memory=0.5 needs.*pass the bytes"):
        torch_paged.Engine(model, kv_cache_memory=0.5)
    assert not torch_paged.is_accelerated(model)


def test_too_large_a_state_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")

    monkeypatch.setattr(core_module, "SlotState", full)
    with pytest.raises(OutOfBlocks, match="256 sequences of up to 128 tokens.*lower max_num_seqs"):
        torch_paged.Engine(copy.deepcopy(small_model()))
