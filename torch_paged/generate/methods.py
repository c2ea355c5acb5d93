"""The decoding methods that stand in for those of `GenerationMixin`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_paged.generate.assisted import assisted_decoding
from torch_paged.generate.beams import beam_search
from torch_paged.generate.decide import opted_out
from torch_paged.generate.registry import find_session
from torch_paged.generate.sample import fall_back, sample
from torch_paged.patches import seams


def _without_fast_path(name: str) -> Callable[..., Any]:
    what = name.strip("_").replace("_", " ")
    reason = what if what.endswith(("search", "decoding")) else f"{what} decoding"

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' own method; an accelerated model notes why."""
        original = seams.DECODING_SEAMS[name].original
        session = find_session(self)
        if session is None:
            return original(self, *args, **kwargs)
        with session.lock:
            reasons = opted_out(kwargs.get("generation_config")) or [reason]
            return fall_back(session, reasons, lambda: original(self, *args, **kwargs))

    method.__name__ = name
    return method


_OURS: dict[str, Callable[..., Any]] = {
    "_sample": sample,
    "_beam_search": beam_search,
    "_assisted_decoding": assisted_decoding,
}
DECODING_METHODS = {
    name: _OURS.get(name) or _without_fast_path(name) for name in seams.DECODING_SEAMS
}
