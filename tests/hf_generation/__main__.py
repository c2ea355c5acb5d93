"""Run transformers' own generation tests plain and accelerated, and print what differs.

    python -m tests.hf_generation PATH_TO_TRANSFORMERS_CHECKOUT [--models llama qwen3]

The checkout should be of the version that is installed; its tests need the packages of
transformers' extra "testing". Exits 1 if the outcome of any test, or what any call returned,
differs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers

import torch_paged

_OUTCOMES = ("passed", "failed", "skipped")
Record = dict[str, dict[str, Any]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hf_generation", description=__doc__)
    parser.add_argument("checkout", type=Path, help="folder of a checkout of transformers")
    parser.add_argument("--models", nargs="+", default=["llama", "qwen3"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="one run each")
    parser.add_argument(
        "--lean",
        action="store_true",
        help="pad the prompts on the left and ask for neither attentions nor hidden states, so "
        "that more calls are ours to serve; tests that look at those fail both ways",
    )
    parser.add_argument(
        "--every-test",
        action="store_true",
        help="run all tests of the models, not only those of generation, and accelerate at eval()",
    )
    parser.add_argument("pytest", nargs="*", help="after --: further arguments of pytest")
    options = parser.parse_args(argv)
    files = [f"tests/models/{name}/test_modeling_{name}.py" for name in options.models]
    missing = [name for name in files if not (options.checkout / name).is_file()]
    if missing:
        parser.error(
            f"{options.checkout} must be a checkout of transformers, got none of "
            f"{', '.join(missing)} in it; clone the tag v{transformers.__version__}"
        )
    switches = {"--lean-calls": options.lean, "--every-test": options.every_test}
    extra = [*files, *options.pytest, *(name for name, is_on in switches.items() if is_on)]
    ok = True
    for seed in options.seeds:
        records = [run(options.checkout, extra, seed, accelerate) for accelerate in (False, True)]
        print(f"\ntransformers {transformers.__version__}, {', '.join(options.models)}, ", end="")
        print(f"seed {seed}")
        for line in describe(*records):
            print(line)
        ok &= not differences(*records)
    return 0 if ok else 1


def run(checkout: Path, arguments: list[str], seed: int, accelerate: bool) -> Record:
    """Run the tests in a process of their own and return what the plugin wrote down."""
    folders = [Path(__file__).parent, Path(torch_paged.__file__).parents[1]]
    # The checkout comes first, with its own `tests`: python -m puts the current folder there.
    paths = [*(str(folder.resolve()) for folder in folders), os.environ.get("PYTHONPATH", "")]
    environment = {"HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
        command += ["-p", "hf_acceleration", f"--generation-record={record}"]
        command += [f"--generation-seed={seed}", *arguments]
        if accelerate:
            command.append("--accelerate-models")
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
        )
        # 1: some tests failed, which is no error here.
        if done.returncode not in (0, 1) or not record.is_file():
            raise SystemExit(
                f"pytest could not run the tests of {checkout}, exit status {done.returncode}:\n"
                f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
            )
        return json.loads(record.read_text())


def describe(plain: Record, accelerated: Record) -> Iterator[str]:
    """Yield the lines of the comparison."""
    yield f"{'':<12}" + "".join(f"{name:>9}" for name in _OUTCOMES)
    for label, record in (("plain", plain), ("accelerated", accelerated)):
        counts = Counter(test["outcome"] for test in record.values())
        yield f"{label:<12}" + "".join(f"{counts[name]:>9}" for name in _OUTCOMES)
    # A call that raised before its first token took no path, with or without us.
    calls = [c for t in accelerated.values() for c in t["calls"] if c["path"] != "none"]
    ways = Counter((call["path"], call["loop"]) for call in calls)
    yield f"{len(calls)} calls decoded:"
    for (path, loop), count in ways.most_common():
        name = path if loop is None else f"{path}, {loop} loop"
        yield f"  {count:>5}  {100 * count / len(calls):5.1f}%  {name}"
    reasons = Counter("; ".join(c["reasons"]) for c in calls if c["path"] == "eager")
    for reason, count in reasons.most_common():
        yield f"  {count:>5}  eager: {reason}"
    for why, count in failures(plain, accelerated).most_common():
        yield f"  {count:>5}  failed both ways: {why}"
    found = differences(plain, accelerated)
    yield f"{len(found)} differences"
    yield from found


def failures(plain: Record, accelerated: Record) -> Counter[str]:
    """Count, by their first line, the failures that are there without us too."""
    both = [t for name, t in plain.items() if accelerated.get(name, t)["outcome"] == "failed"]
    return Counter(_first_line(test["why"]) for test in both if test["outcome"] == "failed")


def differences(plain: Record, accelerated: Record) -> list[str]:
    """Say which tests end differently, and which calls gave other tokens."""
    found = []
    for name in sorted({*plain, *accelerated}):
        before, after = plain.get(name), accelerated.get(name)
        if before is None or after is None:
            found.append(f"{name}: {'only accelerated' if before is None else 'only plain'}")
            continue
        if before["outcome"] != after["outcome"]:
            why = _first_line(after["why"] or before["why"])
            found.append(f"{name}: {before['outcome']} -> {after['outcome']}: {why}")
        outputs = [[call["output"] for call in test["calls"]] for test in (before, after)]
        if len(outputs[0]) != len(outputs[1]):
            found.append(f"{name}: {len(outputs[0])} calls -> {len(outputs[1])} calls")
        for index, (first, second) in enumerate(zip(*outputs, strict=False)):
            if parts := differing_parts(first, second):
                found.append(f"{name}: call {index} returned other {', '.join(parts)}")
    return found


def differing_parts(first: Any, second: Any) -> list[str]:
    """Name the parts of two summaries that differ by more than rounding."""
    if first is None or second is None:
        return [] if first is second else ["error"]
    names = sorted({*first, *second})
    return [name for name in names if not _close(first.get(name), second.get(name))]


def _close(first: Any, second: Any) -> bool:
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_close, first, second))
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-4, abs_tol=1e-6)
    return first == second


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


if __name__ == "__main__":
    sys.exit(main())
