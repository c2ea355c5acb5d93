"""Makes Triton's interpreter round as GPUs do."""

from __future__ import annotations

import os
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    _convert_float = interpreter._convert_float

    def _convert_float_rounding(
        values: Any, source: tl.dtype, destination: tl.dtype, rounding_mode: Any
    ) -> Any:
        """Round fp32 to the nearest bf16, ties to even; the interpreter drops the low bits."""
        if (source, destination) != (tl.float32, tl.bfloat16):
            return _convert_float(values, source, destination, rounding_mode)
        values = np.asarray(values, dtype=np.float32)
        bits = np.frombuffer(values.tobytes(), dtype=np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet_nan = (bits >> 16) | 0x40
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return np.where(is_nan, quiet_nan, rounded).astype(np.uint16).reshape(values.shape)

    interpreter._convert_float = _convert_float_rounding
