"""One command for all numbers: `python -m benchmarks.report --out FOLDER`.

Measures the ceilings of this device, then torch_paged, then what it is compared with, the most
important first. Results are checked before they are timed; a wrong one is named, its model is left
out of the tables, and the exit status is 1. Every measurement is in FOLDER/report.json as soon as
it is made; report.md and the plots are written at the end, also of a run that was cut short.
Without a GPU the same runs on a tiny model.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import shapes
from benchmarks.baselines import BASELINES
from benchmarks.bench import QUICK, SMALL, TRUE, Bench
from benchmarks.ceiling import matmul_tflops, read_tbps
from benchmarks.clocks import Clocks
from benchmarks.parity import WrongResult
from benchmarks.plots import draw
from benchmarks.record import Record, environment_of
from benchmarks.sections import SECTIONS, Unit
from benchmarks.tables import markdown, number
from benchmarks.timing import default_device

ALL_SECTIONS = SECTIONS | BASELINES
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = _parse(arguments)
    folder = Path(args.out)
    path = folder / "report.json"
    if args.render:
        _render(Record.load(path), folder)
        return 0
    started = time.perf_counter()
    device = torch.device(args.device) if args.device else default_device()
    small = device.type == "cpu"
    dtype = args.dtype or ("float32" if small else "bfloat16")
    environment = environment_of(str(device), dtype)
    try:
        record = (Record.resume if args.resume and path.exists() else Record.create)(
            path, environment
        )
    except (FileExistsError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    command = " ".join(["python -m benchmarks.report", *(arguments or sys.argv[1:])])
    record.start_run(command, limit_s=args.limit_seconds)
    handler = signal.signal(signal.SIGTERM, _stop)
    try:
        ceilings = {
            "read_tbps": read_tbps(device),
            "peak_tflops": matmul_tflops(device, _DTYPES[dtype]),
        }
        record.note_run(**ceilings)
        print(" ".join(f"{name} {number(value)}" for name, value in ceilings.items()), flush=True)
        scale = SMALL if small else QUICK if args.quick else TRUE
        models = args.models or ([shapes.TINY] if small else list(shapes.NAMES))
        batches = args.batches or ([1, 3] if small else [1, 8, 32, 128])
        bench = Bench(record, scale, device, _DTYPES[dtype], models, batches, **ceilings)
        with Clocks(device) as clocks:
            ours_failed = _measure(bench, clocks, args.sections, started, args.limit_seconds)
        record.note_run(finished=True)
    finally:
        signal.signal(signal.SIGTERM, handler)
        record.note_run(seconds=time.perf_counter() - started)
        _render(record, folder)
    for model, refusal in record.refused.items():
        print(f"WRONG RESULT of {model}, not reported: {refusal['why']}", file=sys.stderr)
    return 1 if record.refused or ours_failed else 0


def _measure(
    bench: Bench, clocks: Clocks, sections: Sequence[str], started: float, limit_s: float
) -> bool:
    """Make the measurements; say whether one of torch_paged's own failed."""
    record, failed = bench.record, False
    for unit in _units(bench, sections):
        if record.has(unit.key):
            continue
        refusal = record.refused.get(unit.model)
        if refusal is not None and refusal["key"] != unit.key:
            record.left_out[unit.key] = f"{unit.model} had a wrong result"
            continue
        ready_s = bench.ready_s(unit.model) if unit.needs_model else 0.0
        if time.perf_counter() - started + unit.seconds + ready_s > limit_s:
            record.left_out[unit.key] = f"no time was left of {limit_s:.0f} s"
            continue
        begun = time.perf_counter()
        try:
            rows = unit.run()
        except WrongResult as error:
            if unit.is_ours:
                record.refused[unit.model] = {"key": unit.key, "why": str(error)}
            else:
                record.failed[unit.key] = f"wrong result: {error}"
            record.write()
            print(f"{unit.key}: WRONG: {error}", flush=True)
        except Exception as error:  # the others are still worth having
            failed |= unit.is_ours
            record.failed[unit.key] = f"{type(error).__name__}: {error}"[:500]
            record.write()
            print(f"{unit.key}: {error!r:.300}", flush=True)
        else:
            if unit.is_ours:
                record.refused.pop(unit.model, None)
            seen = clocks.since(begun)
            rows = [replace(row, extra={**row.extra, **seen}) for row in rows]
            record.add(rows)
            for row in rows:
                share = "" if row.of_ceiling is None else f", {row.of_ceiling:.0%} of ceiling"
                print(
                    f"{time.perf_counter() - started:6.1f} s  {row.section} {row.model}, "
                    f"{row.case} ({row.system}): {number(row.value)} {row.unit} "
                    f"[{number(row.low)}, {number(row.high)}]{share}",
                    flush=True,
                )
        if not unit.is_ours:
            bench.tidy()
    record.write()
    return failed


def _units(bench: Bench, sections: Sequence[str]) -> Iterator[Unit]:
    for section in sections:
        yield from ALL_SECTIONS[section](bench)


def _render(record: Record, folder: Path) -> None:
    text = markdown(record)
    (folder / "report.md").write_text(text, encoding="utf-8")
    try:
        draw(record, folder)
    except ImportError as error:
        print(error, file=sys.stderr)
    print(f"written to {folder / 'report.md'}", flush=True)


def _stop(signal_number: int, frame: object) -> None:
    raise SystemExit(128 + signal_number)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(ALL_SECTIONS)
    parser.add_argument("--out", default="benchmark-report", help="folder of the results")
    parser.add_argument("--sections", nargs="+", default=names, choices=names, metavar="SECTION")
    parser.add_argument("--models", nargs="+", choices=(*shapes.NAMES, shapes.TINY))
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
    parser.add_argument("--dtype", choices=list(_DTYPES), help="default: bfloat16, float32 on cpu")
    parser.add_argument("--quick", action="store_true", help="fewer steps and repetitions")
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=float("inf"),
        help="start no measurement that would probably end later than that after the imports",
    )
    parser.add_argument("--resume", action="store_true", help="make what report.json lacks")
    parser.add_argument("--render", action="store_true", help="write tables and plots anew")
    parser.epilog = f"sections, in the order in which they are made: {', '.join(names)}"
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
