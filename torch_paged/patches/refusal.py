"""Why a model cannot be read into a spec."""

from __future__ import annotations


class SpecRefusal(Exception):  # noqa: N818 - it is an answer, not an error
    """Raised while reading a model; the message is the reason shown by `explain()`."""
