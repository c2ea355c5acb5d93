"""Graphs that only replay their code, so that what is captured runs without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch

from torch_paged.engine.runner import CapturedRunner


class ReplayingGraphs:
    """Stands in for `GraphCache`: a replay runs the captured code, into a static output."""

    def __init__(self, refused: Collection[str] = ()) -> None:
        self.refusals = dict.fromkeys(refused, "it reads its data back")
        self.refused: set[Hashable] = set()
        self.code: dict[Hashable, Callable[[], Any]] = {}
        self.static: dict[Hashable, torch.Tensor] = {}
        self.num_replays = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self.code

    def prepare(
        self, kind: str, key: Hashable, fn: Callable[[], Any], *, warmup: Any = None
    ) -> bool:
        if key not in self.code:
            if not self.may_capture(kind, key):
                return False
            warmup()
            self.code[key] = fn
        return True

    def may_capture(self, kind: str, key: Hashable) -> bool:
        return kind not in self.refusals and key not in self.refused

    def refuse(self, kind: str, key: Hashable, error: RuntimeError) -> None:
        self.refused.add(key)

    def replay(self, key: Hashable) -> Any:
        self.num_replays += 1
        out = self.code[key]()
        if out is None:
            return None
        if key not in self.static:
            self.static[key] = torch.empty_like(out)
        # What an earlier replay returned is overwritten, as a graph would.
        return self.static[key].copy_(out)

    def clear(self) -> None:
        self.code.clear()
        self.static.clear()


def capture(core: Any, graphs: ReplayingGraphs, buckets: tuple[int, ...] | None = None) -> None:
    """Let the steps of a core be captured, by default in the sizes that it would take itself."""
    made: dict[int, CapturedRunner] = {}
    eager = core.runner

    def captured() -> CapturedRunner:
        eager()  # binds
        state = core.state
        if id(state) not in made:
            graphs.clear()
            made.clear()
            sizes = buckets or core.batch_buckets
            made[id(state)] = CapturedRunner(core.step, state, graphs, sizes)  # type: ignore[arg-type]
        return made[id(state)]

    core.runner = captured
