"""Measured configurations. Made by `python -m benchmarks.ops_experts --sweep`; not edited by hand.

(capability, multiprocessors) -> (token bucket, experts a token takes, number of experts, hidden,
inner, k contiguous in both matrices) -> tokens of a tile, then the fields of the configurations
of both projections in configs.py.
"""

from __future__ import annotations

Shape = tuple[int, int, int, int, int, bool]
Fields = tuple[int, int, int, int, int]
Entry = tuple[int, Fields, Fields]

TABLE: dict[tuple[int, int], dict[Shape, Entry]] = {
    (90, 132): {},
}
