"""The patched tier: the outputs of a model's modules under our attention beside its own."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from torch_paged.generate.check.own_calls import OwnForward, tensors_of
from torch_paged.generate.check.points import Point, match, measure

_INDEX = re.compile(r"\.(\d+)(?=\.|$)")


def compared_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules to compare: each layer and its parts, and the leaves around the layers.

    A layer is an element of an outermost list of modules.
    """
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    found = {}
    for name, module in model.named_modules():
        owner = next((n for n in outermost if name.startswith(f"{n}.")), None)
        if owner is None:
            if name and not next(module.children(), None) and name not in outermost:
                found[name] = module
        elif name.removeprefix(f"{owner}.").count(".") < 2:
            found[name] = module
    return found


class ModuleWalk:
    """Compares what modules return while our step calls the model's own forward.

    Each module's output is then replaced by Hugging Face's, so that an error shows where it is
    made.

    Attributes:
        points: all comparisons so far, in order.
        uncompared: modules that our step called without a counterpart.
    """

    def __init__(self, modules: dict[str, nn.Module], limit: float) -> None:
        self.points: list[Point] = []
        self.uncompared: dict[str, None] = {}
        self._modules = modules
        self._limit = limit

    def begin(self, forward: OwnForward) -> None:
        """Compare with this forward from now on."""
        self._forward = forward
        self._seen: Counter[int] = Counter()

    def end(self, logits: Tensor) -> None:
        """Compare the logits [vocab_size] of the last token."""
        ours = logits[None]
        matched = match(self._forward.logits, ours)
        self._note("logits", "what the model returns", "", ours, matched)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Compare within the block."""
        handles = [
            module.register_forward_hook(
                lambda m, _, output, name=name: self._see(name, m, output)
            )
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, name: str, module: nn.Module, output: Any) -> Any:
        calls = self._forward.calls.get(id(module), [])
        index = self._seen[id(module)]
        self._seen[id(module)] += 1
        tensors = tensors_of(output)
        if not tensors:
            return None
        if index >= len(calls) or not calls[index].outputs:
            self.uncompared[name] = None
            return None
        ours, theirs = tensors[0], calls[index].outputs[0]
        matched = match(theirs, ours)
        self._note(name, f"the output of {name}", type(module).__name__, ours, matched)
        if matched is None:
            return None
        given = matched.to(ours.dtype, copy=True)
        if isinstance(output, Tensor):
            return given
        if type(output) is not tuple:
            return None
        return tuple(given if value is ours else value for value in output)

    def _note(self, name: str, place: str, op: str, ours: Tensor, theirs: Tensor | None) -> None:
        index = _INDEX.search(name)
        layer = None if index is None else int(index.group(1))
        title = name if index is None else name[: index.start()] + ".i" + name[index.end() :]
        self.points.append(
            Point(
                self._forward.phase, title, layer, place, op, *measure(ours, theirs), self._limit
            )
        )


__all__ = ["ModuleWalk", "compared_modules"]
