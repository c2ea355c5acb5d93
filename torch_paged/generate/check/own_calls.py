"""What Hugging Face's modules are given and return in the model's own forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torch_paged.generate.selftest import own_outputs
from torch_paged.patches.attention_seams import eager_attention


@dataclass(frozen=True, slots=True)
class OwnCall:
    """One call of a module.

    Attributes:
        input: its first tensor, or None.
        outputs: the tensors it returns, or those at the top of the tuple it returns.
        names: its arguments that are strings: some modules hold a table for each type of layer.
    """

    input: Tensor | None
    outputs: tuple[Tensor, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OwnForward:
    """One forward of the model.

    Attributes:
        phase: "prefill" or "decode".
        calls: id of a module -> its calls in order.
        logits: [1, num_tokens, vocab_size].
    """

    phase: str
    calls: Mapping[int, list[OwnCall]]
    logits: Tensor


def own_forwards(
    model: Any, modules: Iterable[nn.Module], ids: Tensor, num_prompt_tokens: int
) -> list[OwnForward]:
    """Run the model under eager attention on a prompt and token by token, and note its calls."""
    forwards = []
    calls: dict[int, list[OwnCall]] = {}
    with eager_attention(model), _noted(modules, calls):
        for index, out in enumerate(own_outputs(model, ids, num_prompt_tokens)):
            phase = "decode" if index else "prefill"
            forwards.append(OwnForward(phase, dict(calls), out.logits.clone()))
            calls.clear()
    return forwards


@contextlib.contextmanager
def _noted(modules: Iterable[nn.Module], calls: dict[int, list[OwnCall]]) -> Iterator[None]:
    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = [*args, *kwargs.values()]
        tensors = (value.clone() for value in given if isinstance(value, Tensor))
        names = tuple(value for value in given if isinstance(value, str))
        outputs = tuple(value.clone() for value in tensors_of(output))
        calls.setdefault(id(module), []).append(OwnCall(next(tensors, None), outputs, names))

    unique = {id(module): module for module in modules}.values()
    handles = [module.register_forward_hook(note, with_kwargs=True) for module in unique]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tensors_of(output: object) -> tuple[Tensor, ...]:
    """Return a module's output if it is a tensor, or the tensors in the tuple that it is."""
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, tuple):
        return tuple(value for value in output if isinstance(value, Tensor))
    return ()


__all__ = ["OwnCall", "OwnForward", "own_forwards", "tensors_of"]
