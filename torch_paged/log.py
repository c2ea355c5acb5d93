"""The package's logger; `TORCH_PAGED_LOG=debug|info|warning|error` sets its level."""

from __future__ import annotations

import logging
import os

_LEVELS = ("debug", "info", "warning", "error")
_seen: set[str] = set()


def _make_logger() -> logging.Logger:
    logger = logging.getLogger("torch_paged")
    asked = os.environ.get("TORCH_PAGED_LOG", "").strip().lower()
    # Unset, the application's own logging configuration decides.
    if asked and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("torch_paged: %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(asked.upper() if asked in _LEVELS else logging.WARNING)
        if asked not in _LEVELS:
            logger.warning(
                "TORCH_PAGED_LOG must be one of %s, got %r; using warning",
                ", ".join(_LEVELS),
                asked,
            )
    return logger


logger = _make_logger()


def warn_once(message: str) -> None:
    """Log a warning the first time this process meets `message`, at debug level after that."""
    level = logging.DEBUG if message in _seen else logging.WARNING
    _seen.add(message)
    logger.log(level, message)


def debug_once(message: str) -> None:
    """Log at debug level what this process has not met before."""
    if message not in _seen:
        _seen.add(message)
        logger.debug(message)


__all__ = ["debug_once", "logger", "warn_once"]
