"""How many bytes the KV pool of a model may take."""

from __future__ import annotations

import torch

from torch_paged.config import MIN_CACHE_BYTES, Config
from torch_paged.engine.host_memory import available_bytes


def max_pool_bytes(config: Config, device: torch.device) -> int | None:
    """Return the limit of a pool that is made now; None where only the machine limits it.

    Raises:
        ValueError: `kv_cache_memory` is a share of a memory that is not known, or too small a one.
    """
    limit = config.kv_cache_memory
    if isinstance(limit, int):
        return limit
    if device.type != "cuda":
        return None if limit is None else _at_least_some(limit, _host_share(limit))
    free, total = torch.cuda.mem_get_info(device)
    if limit is not None:
        return _at_least_some(limit, int(limit * total))
    used = total - free
    return max(int(config.gpu_memory_utilization * total) - used, 0)


def _host_share(share: float) -> int:
    available = available_bytes()
    if available is None:
        raise ValueError(
            f"kv_cache_memory={share} needs to know the memory of this machine, which it does "
            "not tell; pass the bytes as an int, e.g. 4 << 30"
        )
    return int(share * available)


def _at_least_some(share: float, num_bytes: int) -> int:
    if num_bytes < MIN_CACHE_BYTES:
        raise ValueError(
            f"kv_cache_memory={share} comes to {num_bytes} bytes of this machine's memory, and at "
            f"least {MIN_CACHE_BYTES} are needed; pass a larger share, e.g. 0.5"
        )
    return num_bytes


__all__ = ["max_pool_bytes"]
