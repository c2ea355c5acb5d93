"""Measured configurations. Made by `python benchmarks/ops_linear.py --sweep`; not edited by hand.

(capability, multiprocessors) -> (token bucket, size class of output features over all weights,
size class of in_features, gated) -> kind and fields of `GemvConfig` or `SmallGemmConfig`.
"""

from __future__ import annotations

Shape = tuple[int, int, int, bool]
Entry = tuple["str | int", ...]

TABLE: dict[tuple[int, int], dict[Shape, Entry]] = {
    (90, 132): {
        (1, 20, 22, False): ("gemv", 2, 2, 4, 4, 64),
        (1, 20, 23, False): ("gemv", 4, 2, 8, 8, 80),
        (1, 22, 22, False): ("gemv", 2, 2, 4, 4, 64),
        (1, 22, 26, False): ("gemv", 2, 2, 8, 8, 64),
        (1, 23, 22, False): ("gemv", 2, 2, 8, 2, 64),
        (1, 24, 20, False): ("gemv", 2, 2, 8, 1, 128),
        (1, 24, 24, False): ("gemv", 2, 2, 8, 4, 64),
        (1, 24, 27, False): ("gemv", 2, 4, 8, 8, 80),
        (1, 25, 20, True): ("gemv", 2, 2, 4, 1, 128),
        (1, 25, 24, False): ("gemv", 2, 2, 4, 4, 64),
        (1, 28, 22, True): ("gemv", 2, 2, 4, 4, 80),
        (1, 29, 24, True): ("gemv", 1, 4, 4, 4, 80),
        (1, 33, 22, False): ("gemv", 4, 2, 8, 4, 80),
        (1, 33, 24, False): ("gemv", 4, 2, 8, 8, 80),
        (1, 34, 20, False): ("gemv", 4, 1, 4, 2, 128),
        (2, 20, 22, False): ("gemv", 2, 2, 4, 4, 96),
        (2, 20, 23, False): ("gemv", 4, 1, 8, 8, 96),
        (2, 22, 22, False): ("gemv", 1, 4, 4, 1, 96),
        (2, 22, 26, False): ("gemv", 2, 4, 4, 4, 96),
        (2, 23, 22, False): ("gemv", 4, 1, 4, 4, 96),
        (2, 24, 24, False): ("gemv", 4, 2, 4, 4, 96),
        (2, 24, 27, False): ("gemv", 2, 4, 8, 8, 96),
        (2, 25, 24, False): ("gemv", 4, 2, 4, 4, 96),
        (2, 28, 22, True): ("gemv", 2, 2, 4, 4, 96),
        (2, 29, 24, True): ("gemv", 1, 4, 4, 4, 96),
        (2, 33, 22, False): ("gemv", 4, 2, 4, 2, 96),
        (2, 33, 24, False): ("gemv", 2, 4, 4, 2, 96),
        (2, 34, 20, False): ("gemv", 4, 2, 4, 1, 96),
    },
}
