"""Makes Triton's interpreter round as GPUs do, and do once what it does in every operation."""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
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
    _seen_globals: set[int] = set()

    def _patch_lang_once(function: FunctionType) -> Any:
        """Patch the language modules that `function` sees, and leave them so.

        The interpreter does that anew in every call of a device function, a third of its time.
        """
        if id(function.__globals__) not in _seen_globals:
            seen = {
                value.__name__
                for value in function.__globals__.values()
                if inspect.ismodule(value) and value in (tl, tl.core)
            }
            if not seen or not seen <= _patched:
                _patch_lang(function)
                _patched.update(seen)
            _seen_globals.add(id(function.__globals__))
        return interpreter._LangPatchScope()

    interpreter._patch_lang = _patch_lang_once

    # The interpreter computes sums and products of integers again in int64, to assert that they
    # do not overflow; outside debug mode it then drops the assertion.
    _builder = interpreter.interpreter_builder
    _builder.options = replace(_builder.options, sanitize_overflow=_builder.options.debug)

    _get_np_dtype = interpreter._get_np_dtype
    _np_dtypes: dict[str, np.dtype] = {}

    def _get_np_dtype_once(dtype: tl.dtype) -> np.dtype:
        """Look a type up among all types once, not in every operation."""
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if scalar.name not in _np_dtypes:
            _np_dtypes[scalar.name] = _get_np_dtype(scalar)
        return _np_dtypes[scalar.name]

    interpreter._get_np_dtype = _get_np_dtype_once

    _initialise_block, _initialise_tensor = tl.block_type.__init__, tl.tensor.__init__
    _of_blocks: dict[tuple[str | int, ...], dict[str, Any]] = {}
    _of_tensors: dict[tuple[int, ...], dict[str, Any]] = {}

    def _initialise_block_once(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        """Check, wrap and print a shape once: that takes longer than most operations on it."""
        sizes = [getattr(size, "value", size) for size in shape]
        key = (element_ty.name, *sizes)
        if key not in _of_blocks or not all(type(size) is int for size in sizes):
            _initialise_block(self, element_ty, shape)
            _of_blocks[key] = dict(vars(self))
        vars(self).update(_of_blocks[key], element_ty=element_ty)

    def _initialise_tensor_once(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        """Wrap the sizes of a shape once."""
        sizes = tuple(type.shape) if isinstance(type, tl.block_type) else ()
        if sizes not in _of_tensors:
            _initialise_tensor(self, handle, type)
            _of_tensors[sizes] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(_of_tensors[sizes], handle=handle, type=type, dtype=type.scalar)

    tl.block_type.__init__, tl.tensor.__init__ = _initialise_block_once, _initialise_tensor_once
