"""Makes Triton's interpreter round as GPUs do, and patch `triton.language` once, not per call."""

from __future__ import annotations

import inspect
import os
from types import FunctionType
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

    _patch_lang = interpreter._patch_lang
    _patched: set[str] = set()

    def _patch_lang_once(function: FunctionType) -> Any:
        """Patch the language modules that `function` sees, and leave them so.

        The interpreter does that anew in every call of a device function, a third of its time.
        """
        seen = {
            value.__name__
            for value in function.__globals__.values()
            if inspect.ismodule(value) and value in (tl, tl.core)
        }
        if not seen or not seen <= _patched:
            _patch_lang(function)
            _patched.update(seen)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = _patch_lang_once
