"""Measured configurations. Made by `python benchmarks/ops_linear.py --sweep`; not edited by hand.

(capability, multiprocessors) -> (token bucket, size class of output features over all weights,
size class of in_features, gated) -> kind and fields of `GemvConfig` or `SmallGemmConfig`.
"""

from __future__ import annotations

Shape = tuple[int, int, int, bool]
Entry = tuple["str | int", ...]

TABLE: dict[tuple[int, int], dict[Shape, Entry]] = {}
