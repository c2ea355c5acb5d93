"""Runs compute-sanitizer over every kernel of torch_paged.ops.

    python tests/gpu/sanitize.py                    # memcheck and racecheck, in parallel shards
    python tests/gpu/sanitize.py --tools memcheck --jobs 4
    python tests/gpu/sanitize.py --only 'gemm|decode'   # the calls whose names match
    python tests/gpu/sanitize.py --shard 0/1        # the calls alone, without the sanitizer

First the shards run without it, which fills Triton's cache; then once for each tool. Fails if a
tool reports anything, if a call fails, or if all calls together leave a kernel out. Memcheck sees
reads and writes past an allocation, of which each tensor has its own; racecheck sees shared memory
only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
_LAUNCHED = "launched kernels: "
_OPTIONS = {
    # torch asks the driver for functions that it may lack, and that is no fault of a kernel.
    "memcheck": ["--report-api-errors", "no"],
    "racecheck": ["--racecheck-report", "all"],
    "synccheck": [],
}
_CLEAN = {
    "memcheck": r"ERROR SUMMARY: 0 errors",
    "racecheck": r"RACECHECK SUMMARY: 0 hazards",
    "synccheck": r"ERROR SUMMARY: 0 errors",
}


def find_sanitizer() -> str:
    """Return the path of compute-sanitizer."""
    near = [Path(p).parent for p in (shutil.which("nvcc"),) if p]
    roots = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    near += [Path(root) / "bin" for root in roots]
    near += sorted(Path("/usr/local").glob("cuda*/bin"), reverse=True)
    near += sorted(Path("/usr/local").glob("cuda*/compute-sanitizer"), reverse=True)
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, near)])
    found = shutil.which("compute-sanitizer", path=path)
    if found is None:
        raise SystemExit(
            f"compute-sanitizer must be on PATH or in CUDA_HOME/bin, found in none of {path}; "
            "install the CUDA toolkit's cuda-sanitizer package or set CUDA_HOME"
        )
    return found


class Outcome(NamedTuple):
    """How a shard ended."""

    tool: str
    shard: str
    code: int
    output: str
    seconds: float

    @property
    def kernels(self) -> set[str]:
        match = re.search(re.escape(_LAUNCHED) + r"(.*)", self.output)
        return set(json.loads(match.group(1))) if match else set()

    @property
    def fault(self) -> str:
        """Say what is wrong, or return ""."""
        if self.code != 0:
            return f"exit code {self.code}"
        if self.tool in _CLEAN and not re.search(_CLEAN[self.tool], self.output):
            return "the tool's summary is not clean"
        return "" if _LAUNCHED in self.output else "the calls did not come to their end"


def run_shard(
    tool: str, shard: str, sanitizer: str, no_pdl: bool, limit: float, only: str
) -> Outcome:
    """Run one shard in its own process, under `tool` unless that is "plain"."""
    command = [sys.executable, str(Path(__file__)), "--shard", shard, "--only", only]
    command += ["--no-pdl"] if no_pdl else []
    environment = os.environ | {
        # An allocation of its own for each tensor, or the tool sees one large segment.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if tool != "plain":
        prefix = [sanitizer, "--tool", tool, "--target-processes", "application-only"]
        command = [*prefix, "--error-exitcode", "99", *_OPTIONS[tool], *command]
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        # A session of its own, so that the limit ends what the tool started as well.
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        ) as process:
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = 124
        log.seek(0)
        return Outcome(tool, shard, code, log.read(), time.perf_counter() - start)


def missing_kernels(launched: set[str]) -> list[str]:
    """Return the kernels of torch_paged.ops that are not in `launched`."""
    from tests.ops.targets import find_kernels

    return sorted(find_kernels() - launched)


def run_tools(
    tools: Sequence[str],
    jobs: int,
    sanitizer: str,
    no_pdl: Sequence[str],
    limit: float,
    only: str,
) -> int:
    """Run all shards under all tools and return the exit code."""
    failed = False
    # Without a tool the time goes to the compiler, which takes as many cores as there are.
    for group, count in ((["plain"], max(jobs, os.cpu_count() or 1)), (list(tools), jobs)):
        shards = [f"{index}/{count}" for index in range(count)]
        work = [(tool, shard) for tool in group for shard in shards]
        with ThreadPoolExecutor(max(len(work), 1)) as threads:
            outcomes = list(
                threads.map(
                    lambda job: run_shard(*job, sanitizer, job[0] in no_pdl, limit, only), work
                )
            )
        for tool in group:
            own = [outcome for outcome in outcomes if outcome.tool == tool]
            launched = set().union(*(outcome.kernels for outcome in own))
            missing = [] if only else missing_kernels(launched)
            faults = [outcome for outcome in own if outcome.fault]
            for outcome in faults:
                print(f"-- {tool} {outcome.shard}: {outcome.fault}\n{outcome.output[-6000:]}")
            if missing:
                print(f"-- {tool}: no call in tests/gpu/kernel_calls.py launched {missing}")
            failed |= bool(faults or missing)
            longest = max(outcome.seconds for outcome in own)
            verdict = "FAILED" if faults or missing else "clean"
            print(f"{tool}: {verdict}, {count} shards, the longest {longest:.0f} s", flush=True)
        if failed:
            return 1
    return 0


def record_launches(launched: set[str]) -> None:
    """Note each kernel that Triton launches, as ``module:function`` under torch_paged.ops."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for cls in (JITFunction, InterpretedFunction):
        run = cls.run

        def recording(self: Any, *args: Any, _run: Any = run, **kwargs: Any) -> Any:
            module = self.fn.__module__.removeprefix("torch_paged.ops.")
            launched.add(f"{module}:{self.fn.__name__}")
            return _run(self, *args, **kwargs)

        cls.run = recording  # type: ignore[method-assign]


def run_calls(shard: str, no_pdl: bool, only: str) -> None:
    """Make the calls of one shard whose names match `only` in this process."""
    import torch

    # The ops without the layers above them, which take longer to import than the calls to run.
    sys.modules["torch_paged"] = types.ModuleType("torch_paged")
    sys.modules["torch_paged"].__path__ = [str(ROOT / "torch_paged")]
    interpreted = not torch.cuda.is_available()
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
        launch_on_the_cpu()
    launched: set[str] = set()
    record_launches(launched)
    from tests.gpu.kernel_calls import CALLS

    if no_pdl:
        for name, module in list(sys.modules.items()):
            if name.startswith("torch_paged.ops") and hasattr(module, "use_pdl"):
                module.use_pdl = lambda tensor: False
    index, count = map(int, shard.split("/"))
    for name in [name for name in CALLS if re.search(only, name)][index::count]:
        print(name, flush=True)
        CALLS[name]()
        if not interpreted:
            torch.cuda.synchronize()
    print(_LAUNCHED + json.dumps(sorted(launched)), flush=True)
    if count == 1 and not only and (missing := missing_kernels(launched)):
        raise SystemExit(f"no call in tests/gpu/kernel_calls.py launched {missing}")


def launch_on_the_cpu() -> None:
    """Register the launchers in place of the references, for the interpreter."""
    from torch_paged.ops import registration

    register = registration.register_op

    def register_launcher(schema: str, *, cpu: Any, cuda: Any, fake: Any) -> Any:
        return register(schema, cpu=cuda, cuda=cuda, fake=fake)

    registration.register_op = register_launcher


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", default=["memcheck", "racecheck"], choices=_OPTIONS)
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8))
    parser.add_argument("--only", default="", help="calls whose names match this pattern")
    parser.add_argument("--limit", type=float, default=200, help="seconds for a shard")
    parser.add_argument(
        "--no-pdl-in", nargs="*", default=[], choices=_OPTIONS, help="tools to run without PDL"
    )
    parser.add_argument("--shard", default="", help="i/n: make the calls, in this process")
    parser.add_argument("--no-pdl", action="store_true", help="with --shard")
    args = parser.parse_args()
    if args.shard:
        sys.path.insert(0, str(ROOT))
        run_calls(args.shard, args.no_pdl, args.only)
        return 0
    sys.path.insert(0, str(ROOT))
    return run_tools(
        args.tools, args.jobs, find_sanitizer(), args.no_pdl_in, args.limit, args.only
    )


if __name__ == "__main__":
    sys.exit(main())
