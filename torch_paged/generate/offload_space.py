"""How much host memory transformers' configuration of continuous batching asks for."""

from __future__ import annotations

from typing import Any

from torch_paged.config import Config
from torch_paged.engine.host_memory import available_bytes
from torch_paged.generate.registry import find_session
from torch_paged.log import logger

# Those of transformers, for releases whose configuration lacks the fields.
_SPACE, _THRESHOLD = 0.0, 0.8


def wanted_host_bytes(model: Any, batching_config: Any) -> int:
    """Return the larger of what it and the model's own `Config` ask for, in bytes.

    ``cpu_offload_space`` of it is in GiB, and limited to ``cpu_offload_space_safety_threshold`` of
    the memory that is available; None takes that much.

    Raises:
        TypeError: a field is no number.
        ValueError: a field is out of range, or the machine does not tell its memory.
    """
    session = find_session(model)
    own = 0 if session is None else session.config.host_bytes
    return max(own, _bytes_of(batching_config))


def _bytes_of(batching_config: Any) -> int:
    space = getattr(batching_config, "cpu_offload_space", _SPACE)
    asked = None if space is None else Config(cpu_offload_space=space).host_bytes
    if asked == 0:
        return 0
    most = _most_bytes(getattr(batching_config, "cpu_offload_space_safety_threshold", _THRESHOLD))
    if asked is None:
        if most is None:
            raise ValueError(
                "cpu_offload_space=None needs to know the memory of this machine, which it does "
                "not tell; pass the GiB, e.g. 4.0"
            )
        return most
    if most is not None and most < asked:
        logger.warning("cpu_offload_space=%s GiB is more than may be taken: %d bytes", space, most)
        return most
    return asked


def _most_bytes(threshold: Any) -> int | None:
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise TypeError(
            "cpu_offload_space_safety_threshold must be a fraction in [0, 1], got "
            f"{threshold!r} of type {type(threshold).__name__}; pass e.g. 0.8"
        )
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(
            f"cpu_offload_space_safety_threshold must be a fraction in [0, 1], got {threshold}; "
            "0.8 is the default"
        )
    available = available_bytes()
    return None if available is None else int(threshold * available)


__all__ = ["wanted_host_bytes"]
