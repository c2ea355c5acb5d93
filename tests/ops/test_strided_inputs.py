"""No op reads past the strides of what it is given: it takes a view as its copy, or refuses it.

The references are torch and right for any strides, so each public function runs with its kernel.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_paged.ops
from torch_paged.ops.registration import _CALLS

# For the module beside this one.
sys.path.append(str(Path(__file__).parent))

from op_cases import CASES, DEVICE  # noqa: E402

for _module in pkgutil.walk_packages(torch_paged.ops.__path__, "torch_paged.ops."):
    importlib.import_module(_module.name)

# An argument, and the place in it where it is a list.
Place = tuple[str, int | None]


@functools.cache
def _home(name: str) -> tuple[Any, str]:
    """Return the module that defines an op, and what it calls the op there."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch_paged.ops.") and not module_name.endswith(".unchecked"):
            for attribute, value in vars(module).items():
                if value is _CALLS[name]:
                    return module, attribute
    raise AssertionError(f"no module of torch_paged.ops holds {name}")


def _public(name: str) -> Callable[..., Any]:
    home, _ = _home(name)
    return getattr(home, "add_to_checksum" if name == "checksum" else name)


def _bound(name: str) -> dict[str, Any]:
    case = CASES[name]
    return inspect.signature(_public(name)).bind(*case.args, **case.kwargs).arguments


def _tensors(arguments: dict[str, Any]) -> Iterator[tuple[Place, Tensor]]:
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield (name, None), value
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, Tensor):
                    yield (name, index), item


def _copied(arguments: dict[str, Any]) -> dict[str, Any]:
    def copied(value: Any) -> Any:
        if isinstance(value, list):
            return [copied(item) for item in value]
        return value.clone() if isinstance(value, Tensor) else value

    return {name: copied(value) for name, value in arguments.items()}


def _put(arguments: dict[str, Any], place: Place, tensor: Tensor) -> None:
    name, index = place
    if index is None:
        arguments[name] = tensor
    else:
        arguments[name][index] = tensor


def _poison(name: str, tensor: Tensor) -> Tensor:
    """Return what a kernel may read by mistake and must not: wrong, but inside of everything."""
    if tensor.is_floating_point():
        return torch.full_like(tensor, torch.nan)
    if tensor.dtype == torch.bool:
        return ~tensor
    if name == "counters":  # all of them 0
        return torch.full_like(tensor, 7)
    return tensor.flatten().roll(1).view_as(tensor)


def _with_gaps(name: str, tensor: Tensor) -> Tensor:
    return torch.stack([tensor, _poison(name, tensor)], dim=-1)[..., 0]


def _in_wider_rows(name: str, tensor: Tensor) -> Tensor:
    return torch.cat([tensor, _poison(name, tensor)], dim=-1)[..., : tensor.shape[-1]]


def _transposed(name: str, tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if tensor.dim() > 1 else tensor


def _expanded(name: str, tensor: Tensor) -> Tensor:
    return tensor[:1].expand_as(tensor)


VIEWS = {
    "gaps": _with_gaps,
    "wider rows": _in_wider_rows,
    "transposed": _transposed,
    "expanded": _expanded,
}


def _is_written(name: str, argument: str) -> bool:
    schema = getattr(torch.ops.torch_paged, name).default._schema
    alias = next(a.alias_info for a in schema.arguments if a.name == argument)
    return alias is not None and alias.is_write


def _run(name: str, arguments: dict[str, Any]) -> list[Tensor]:
    """Return the results, and all arguments as the op leaves them."""
    out = _public(name)(**arguments)
    results = [out] if isinstance(out, Tensor) else list(out or ())
    return results + [tensor.clone() for _, tensor in _tensors(arguments)]


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let an op launch its kernel on any device."""
    name: str = request.param
    if DEVICE == "cpu":
        home, attribute = _home(name)
        monkeypatch.setattr(home, attribute, getattr(home, f"_launch_{name.rstrip('_')}"))
    return name


def test_every_op_has_a_case():
    assert CASES.keys() == _CALLS.keys()


@functools.cache
def _from_copies(name: str) -> list[Tensor]:
    """Return what `_run` does without any view."""
    return _run(name, _copied(_bound(name)))


def _misread(name: str, place: Place, kind: str) -> str:
    """Say what is wrong with an op that is given a view of one argument, or return ""."""
    argument = place[0]
    arguments = _copied(_bound(name))
    tensor = dict(_tensors(arguments))[place]
    view = VIEWS[kind](argument, tensor)
    # Rows of a step have slots, tokens places, and what is written blocks, of their own.
    alone = argument in ("slots", "dst", "slot_mapping") or _is_written(name, argument)
    alone |= (name, argument) == ("fused_decode_attention", "block_table")
    if view.is_contiguous() or (kind == "expanded" and alone):
        return ""
    expected = functools.partial(_from_copies, name)
    if kind == "expanded":
        same = _copied(arguments)
        _put(same, place, view.contiguous())
        expected = functools.partial(_run, name, same)
    _put(arguments, place, view)
    try:
        got = _run(name, arguments)
    except (TypeError, ValueError):
        return "is refused" if argument in CASES[name].takes else ""
    try:
        torch.testing.assert_close(got, expected(), equal_nan=True)
    except AssertionError:
        return "is misread"
    return ""


@pytest.mark.parametrize("kernels", CASES, indirect=True)
def test_a_view_is_read_as_its_copy_or_refused(kernels):
    found = [
        f"{place} with {kind} {what}"
        for place, _ in _tensors(_bound(kernels))
        for kind in VIEWS
        if (what := _misread(kernels, place, kind))
    ]
    assert not found, f"{kernels}: {'; '.join(found)}"
