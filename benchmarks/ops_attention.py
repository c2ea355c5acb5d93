"""Decode and prefill attention against the read ceiling and torch's SDPA.

    python -m benchmarks.ops_attention [--sweep | --ragged]

Times are medians under CUDA graph replay. A graph runs one launch per layer, each on blocks of its
own, so that every layer's cache comes from memory and not from L2. `--sweep` times other
configurations than the checked-in ones, `--ragged` those of rows of all lengths and nothing else.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import time
from typing import Any

import torch

from benchmarks.attention_cases import SHAPES, DecodeCase, PrefillCase, ragged_contexts
from benchmarks.ceiling import read_tbps
from torch_paged.ops.paged_attention.config import DecodeConfig, PrefillConfig

DECODE_CASES = (
    [(1, 15)] + [(b, 200) for b in (1, 8, 32, 128)] + [(b, 2048) for b in (1, 8, 32, 128)]
)
DECODE_CASES.append((1, 32768))
PREFILL_TOKENS = [512, 2048, 8192]
RAGGED_ROWS = (8, 17, 32, 64, 128, 256)
RAGGED_TABLE = 4096


def _decode_variants() -> list[DecodeConfig]:
    """Configurations that differ in what is compiled."""
    tiles = [(16384, 4, 2, 0), (16384, 4, 3, 0), (16384, 4, 4, 0), (16384, 8, 3, 0)]
    tiles += [(8192, 4, 4, 0), (32768, 4, 2, 0), (32768, 8, 2, 0), (32768, 8, 3, 0)]
    tiles += [(65536, 8, 2, 0), (16384, 4, 3, 256), (32768, 8, 2, 256), (32768, 8, 3, 256)]
    tiles += [(65536, 8, 2, 256)]
    found = [
        DecodeConfig(tile_bytes=t, num_warps=w, num_stages=s, prefetch_tokens=p)
        for t, w, s, p in tiles
    ]
    # Those of many programs, and of a few for each multiprocessor.
    for tile, warps, stages in ((8192, 4, 2), (8192, 4, 3), (16384, 4, 2), (32768, 8, 2)):
        base = DecodeConfig(tile_bytes=tile, num_warps=warps, num_stages=stages)
        found.append(dataclasses.replace(base, early_tile=True))
        found.append(dataclasses.replace(base, heads_first=True))
    return found


def _split_variants(config: DecodeConfig, tokens: int) -> list[DecodeConfig]:
    """Configurations that differ in how the context is split, which is a run-time matter."""
    if tokens == 200:
        return [
            dataclasses.replace(config, single_tokens=n, min_split_tokens=64) for n in (64, 128)
        ]
    return [
        dataclasses.replace(config, min_split_tokens=split, programs_per_sm=programs)
        for split in (64, 128, 256)
        for programs in (1, 2, 4)
    ]


def _ragged_variants() -> list[DecodeConfig]:
    """Configurations of many programs, of which those of long rows may be split."""
    found = []
    for tile, warps, stages, early in (
        *((8192, 4, 2, 0), (8192, 4, 3, 0), (8192, 2, 2, 0), (8192, 2, 3, 0), (8192, 2, 2, 1)),
        *((4096, 1, 4, 0), (4096, 2, 3, 0), (4096, 2, 3, 1), (16384, 2, 2, 0), (16384, 4, 2, 0)),
    ):
        base = DecodeConfig(
            tile, 256, 128, 0, 64, warps, stages, bool(early), heads_first=not early
        )
        found.append(base)
        for tokens, programs in ((256, 8), (512, 16)):
            split = {"single_tokens": tokens, "min_split_tokens": tokens}
            found.append(dataclasses.replace(base, programs_per_sm=programs, **split))
    return found


def _prefill_variants() -> list[PrefillConfig]:
    tiles = [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2)]
    return [PrefillConfig(*tile) for tile in tiles]


def _compile(job: tuple[str, tuple[int, int, int], Any]) -> None:
    """Fill Triton's disk cache with one variant, in a process of its own."""
    kind, heads, config = job
    if kind == "prefill":
        for num_tokens in PREFILL_TOKENS:
            PrefillCase(heads, num_tokens).run(0, config)
    else:
        for batch in (1, 64):  # with and without splits
            DecodeCase(heads, batch, 20, cold_bytes=0).run(0, config)
    torch.cuda.synchronize()


def _compile_all(decode: list[DecodeConfig], prefill: list[PrefillConfig]) -> None:
    jobs: list[tuple[str, tuple[int, int, int], Any]] = []
    for heads in SHAPES:
        jobs += [("decode", heads, None), ("prefill", heads, None)]
        jobs += [("decode", heads, config) for config in decode]
        jobs += [("prefill", heads, config) for config in prefill]
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(14, (os.cpu_count() or 2) - 2, len(jobs)))
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for job, future in [(job, pool.submit(_compile, job)) for job in jobs]:
            if future.exception() is not None:
                print(f"{job} does not run: {future.exception()}")


def _try(case: DecodeCase | PrefillCase, config: Any) -> float:
    """Return microseconds, infinite where the configuration does not run or is wrong."""
    try:
        error = case.check(config)
        return case.time(config)[0] if error < 1e-2 else math.inf
    except Exception as exception:
        print(f"{config}: {exception!r:.200}")
        return math.inf


def _rows_of(case: str, timed: list[tuple[Any, float]]) -> list[dict[str, Any]]:
    """Print the best of a case; return all, the quickest first."""
    timed.sort(key=lambda pair: pair[1])
    shown = " | ".join(f"{us:.2f} {dataclasses.astuple(config)}" for config, us in timed[:7])
    print(f"{case}: {shown} ... {timed[-1][1]:.2f}", flush=True)
    return [
        {"case": case, "us": us, "config": dataclasses.astuple(config)} for config, us in timed
    ]


def sweep_ragged(ceiling: float) -> list[dict[str, Any]]:
    """Time variants of decode attention over rows of all lengths."""
    rows: list[dict[str, Any]] = []
    for num_rows, heads in itertools.product(RAGGED_ROWS, SHAPES):
        case = DecodeCase(heads, num_rows, ragged_contexts(num_rows), max_tokens=RAGGED_TABLE)
        least, now = case.bytes / ceiling / 1e6, _try(case, None)
        print(f"at the ceiling {least:.1f} us, chosen {now:.1f} us, others:", end=" ")
        name = f"decode {heads} b{num_rows} ragged"
        rows.append({"case": name, "us": now, "at_the_ceiling_us": least, "config": None})
        rows += _rows_of(name, [(c, _try(case, c)) for c in _ragged_variants()])
        del case
    return rows


def sweep() -> list[dict[str, Any]]:
    """Time variants of both kernels and print the best of each case."""
    rows: list[dict[str, Any]] = []
    for heads in SHAPES:
        for num_tokens in PREFILL_TOKENS:
            prompt = PrefillCase(heads, num_tokens)
            timed = [(config, _try(prompt, config)) for config in _prefill_variants()]
            rows += _rows_of(f"prefill {heads} {num_tokens}", timed)
    cases = [(1, 200), (1, 2048), (1, 32768), (8, 2048), (32, 200), (32, 2048)]
    for batch, tokens in [*cases, (64, 200), (128, 160), (128, 1024)]:
        for heads in SHAPES:
            case = DecodeCase(heads, batch, tokens)
            configs = _decode_variants()
            if batch < 32:
                configs += _split_variants(DecodeConfig(), tokens)
                large = DecodeConfig(tile_bytes=32768, num_warps=8)
                configs += _split_variants(large, tokens)
            timed = [(config, _try(case, config)) for config in configs]
            rows += _rows_of(f"decode {heads} b{batch} ctx {tokens}", timed)
            del case
    return rows


def measure(ceiling: float) -> dict[str, Any]:
    """Check and time the configurations in use; print a line for each case."""
    record: dict[str, Any] = {"decode": [], "prefill": []}
    for heads, (batch, tokens) in itertools.product(SHAPES, DECODE_CASES):
        case = DecodeCase(heads, batch, tokens)
        error = case.check()
        us, spread = case.time()
        row = {"heads": heads, "batch": batch, "context": tokens, "us": us, "spread_us": spread}
        row |= {"error": error, "gbps": case.bytes / us / 1e3}
        record["decode"].append(row)
        line = (
            f"decode {heads!s:13} b{batch:<3} ctx {tokens:<5} {us:7.2f} us (+-{spread:.2f}) "
            f"{row['gbps']:5.0f} GB/s {row['gbps'] / ceiling / 10:5.1f}%  error {error:.1e}"
        )
        assert error < 1e-2, line
        print(line, flush=True)
        del case
    for heads, num_tokens in itertools.product(SHAPES, PREFILL_TOKENS):
        prompt = PrefillCase(heads, num_tokens)
        error = prompt.check()
        us, spread = prompt.time()
        times = {"ours": us} | prompt.time_sdpa()
        tflops = {name: prompt.flops / us / 1e6 for name, us in times.items()}
        record["prefill"].append({"heads": heads, "tokens": num_tokens, "us": times})
        record["prefill"][-1] |= {"tflops": tflops, "spread_us": spread, "error": error}
        shown = ", ".join(f"{name} {value:.0f}" for name, value in tflops.items())
        line = (
            f"prefill {heads!s:13} {num_tokens:<5} {us:7.1f} us  TFLOP/s {shown} error {error:.1e}"
        )
        assert error < 1e-2, line
        print(line, flush=True)
    return record


def main() -> None:
    """Check, time and print; JSON under $OUT where that is set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--ragged", action="store_true", help="rows of all lengths alone")
    args = parser.parse_args()
    torch.manual_seed(0)
    began = time.perf_counter()
    record: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    decode = _decode_variants() if args.sweep else []
    decode += _ragged_variants() if args.ragged else []
    _compile_all(decode, _prefill_variants() if args.sweep else [])
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    record["read_tbps"] = ceiling = read_tbps()
    print(f"{record['gpu']}, torch {torch.__version__}, read ceiling {ceiling:.2f} TB/s")
    if args.ragged:
        record["ragged"] = sweep_ragged(ceiling)
    else:
        record |= measure(ceiling)
    if args.sweep:
        record["sweep"] = sweep()
    record["seconds"] = time.perf_counter() - began
    print(f"{record['seconds']:.0f} s", flush=True)
    if "OUT" in os.environ:
        with open(os.path.join(os.environ["OUT"], "ops_attention.json"), "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
