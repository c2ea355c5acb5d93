"""Exceptions of torch_paged. Wrong arguments raise ``ValueError`` or ``TypeError`` instead."""

from __future__ import annotations


class TorchPagedError(RuntimeError):
    """Base of the run-time failures that torch_paged raises itself."""


class OutOfBlocks(TorchPagedError):
    """The KV pool, its limit or the device has no room for the blocks asked for."""


class UnsupportedModelError(NotImplementedError):
    """The model has a structure that torch_paged cannot accelerate."""


class UnsupportedFeatureError(NotImplementedError):
    """The model is supported, but not together with the option or argument asked for."""


__all__ = ["OutOfBlocks", "TorchPagedError", "UnsupportedFeatureError", "UnsupportedModelError"]
