"""torch_paged: decode Hugging Face causal LMs at the speed limit of the GPU, weights in place."""

from __future__ import annotations

from torch_paged._version import __version__
from torch_paged.config import Config
from torch_paged.engine.output import RequestOutput
from torch_paged.generate.accelerate import (
    accelerate,
    accelerated,
    explain,
    is_accelerated,
    recorded_logprobs,
    release,
    restore,
    stats,
    weights_changed,
)
from torch_paged.generate.logprobs import TokenLogprobs
from torch_paged.generate.serving import Engine
from torch_paged.report import CallReport, Report, Stats

__all__ = [
    "CallReport",
    "Config",
    "Engine",
    "Report",
    "RequestOutput",
    "Stats",
    "TokenLogprobs",
    "__version__",
    "accelerate",
    "accelerated",
    "explain",
    "is_accelerated",
    "recorded_logprobs",
    "release",
    "restore",
    "stats",
    "weights_changed",
]
