"""Measured configurations. Made by `python benchmarks/ops_linear.py --sweep`; not edited by hand.

(capability, multiprocessors) -> (token bucket, size class of output features over all weights,
size class of in_features, gated) -> (rows, chunks, warps, registers) of `GemvConfig` or
(rows, chunks, warps, splits, registers) of `SmallGemmConfig`.
"""

TABLE: dict[tuple[int, int], dict[tuple[int, int, int, bool], tuple[int, ...]]] = {}
