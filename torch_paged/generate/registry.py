"""Which models are accelerated: a weak registry, so a deleted model takes its state along."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from torch import nn

from torch_paged.engine.turns import Turns

if TYPE_CHECKING:
    from torch_paged.generate.session import Session

_SESSIONS: weakref.WeakKeyDictionary[nn.Module, Session] = weakref.WeakKeyDictionary()
_TURNS: weakref.WeakKeyDictionary[nn.Module, Turns] = weakref.WeakKeyDictionary()


def disabled() -> bool:
    """Say whether TORCH_PAGED_DISABLE is set."""
    return os.environ.get("TORCH_PAGED_DISABLE", "") not in ("", "0")


def find_session(model: nn.Module) -> Session | None:
    """Return the session of an accelerated model, or None."""
    return _SESSIONS.get(model)


def add_session(model: nn.Module, session: Session) -> None:
    _SESSIONS[model] = session


def remove_session(model: nn.Module) -> Session | None:
    """Forget the session of `model` and return it."""
    return _SESSIONS.pop(model, None)


def turns_of(model: nn.Module) -> Turns:
    """Return the lock of a model: one for all its sessions, as a thread may wait in an old one."""
    return _TURNS.setdefault(model, Turns())
