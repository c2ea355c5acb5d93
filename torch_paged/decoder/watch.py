"""Watching the modules of a spec: what changed since a plan was bound.

All three questions are asked before every run, of some 400 modules. So they are answered from flat
lists, by `map` over functions in C where nothing has changed: a third of what loops take.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from itertools import repeat
from operator import contains, eq, is_
from typing import Any

import torch
from torch import Tensor, nn

from torch_paged.decoder.rotary import changing_rotaries
from torch_paged.decoder.slots import hook_dicts, is_gradient_hook
from torch_paged.decoder.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    MlpSpec,
    ModuleRef,
    OpaqueMlpSpec,
    RotaryLookup,
)

# What no arithmetic of a decode step follows: training, and what configs say of a forward's form.
_OF_TRAINING = ("training", "gradient_checkpointing")
_OF_CALLS = {
    "architectures",  # set by save_pretrained
    "dtype",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "torch_dtype",
    "use_cache",
}
_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))
# States of adapters that are told apart; one that comes back later counts as new.
_MAX_VARIANTS = 64

_data_ptr = torch.Tensor.data_ptr


class _Entries:
    """Entries of dictionaries, by name."""

    def __init__(self, entries: Iterable[tuple[dict[str, Any], str]]) -> None:
        found = list(entries)
        self._stores = [store for store, _ in found]
        self._names = [name for _, name in found]

    def now(self) -> Iterator[Any]:
        """Yield their values, None for those that are gone."""
        return map(dict.get, self._stores, self._names)


def spec_modules(spec: DecoderSpec) -> list[ModuleRef]:
    """Return every module that the spec names, once each, in order."""
    refs = [spec.embedding, *(r.ref for r in spec.rotaries), spec.head.ref]
    refs += [p.ref for p in (spec.project_in, spec.project_out, spec.positions) if p is not None]
    norms = [spec.final_norm, spec.embedding_norm]
    for layer in spec.layers:
        attention = layer.attention
        refs += [p.ref for p in attention.linears]
        refs += _mlp_modules(layer.mlp)
        refs += _sinks(attention)
        norms += [layer.input_norm, layer.mlp_norm, layer.post_attention_norm]
        norms += [layer.post_mlp_norm, *attention.norms]
        norms += layer.sum_norms or ()
    refs += [norm.ref for norm in norms if norm is not None]
    return list({id(ref.module): ref for ref in refs}.values())


def _sinks(attention: AttentionSpec | LatentAttentionSpec) -> list[ModuleRef]:
    if isinstance(attention, LatentAttentionSpec) or attention.sinks is None:
        return []
    return [attention.sinks[0]]


def _mlp_modules(mlp: MlpSpec | ExpertsSpec | OpaqueMlpSpec) -> list[ModuleRef]:
    if isinstance(mlp, OpaqueMlpSpec):
        return [mlp.ref]
    if isinstance(mlp, MlpSpec):
        return [p.ref for p in (*mlp.inputs, mlp.output)]
    refs = [mlp.router.ref, mlp.ref]
    refs += [mlp.router.correction[0]] if mlp.router.correction else []
    refs += [mlp.shared_gate.ref] if mlp.shared_gate else []
    return refs + (_mlp_modules(mlp.shared) if mlp.shared else [])


def _adapter_state(module: Any) -> tuple[object, ...]:
    """Return all but the tensors that decides what a wrapper of PEFT computes."""
    active = module._active_adapter
    return (
        module._disable_adapters,
        active if isinstance(active, str) else tuple(active),
        tuple(getattr(module, "merged_adapters", ())),
        tuple(
            scale if isinstance(scale, int | float) else id(scale)
            for scale in getattr(module, "scaling", {}).values()
        ),
        getattr(module, "cast_input_dtype_enabled", True),
        module.training,
    )


def _is_constant(module: nn.Module, name: str) -> bool:
    """Say whether a flag is not of training, nor of an adapter, whose state has its own number."""
    own = not name.startswith("_") and name not in _OF_TRAINING
    return own and not hasattr(module, "_disable_adapters")


def _fields(config: object) -> Iterator[tuple[str, object]]:
    """Yield what a config says of the arithmetic; forwards read some of it at every step."""
    for name, value in vars(config).items():
        if name[0] != "_" and name not in _OF_CALLS and not name.endswith("_token_id"):
            if type(value) in _PLAIN:
                yield name, value


class _ConfigWatch:
    """Snapshot of the fields of all configs that modules hold."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        configs = [module.__dict__.get("config") for module in modules]
        distinct = {id(c): c for c in configs if hasattr(c, "__dict__")}.values()
        self._seen = [
            (config, copy.deepcopy(dict(_fields(config))), _snapshot(config))
            for config in distinct
        ]

    def changed(self) -> bool:
        return any(
            vars(config) != everything and dict(_fields(config)) != fields
            for config, fields, everything in self._seen
        )


def _snapshot(config: object) -> dict[str, object]:
    """Return all that a config holds; what is not plain is equal to itself at least."""
    return {
        name: copy.deepcopy(value) if type(value) in _PLAIN else value
        for name, value in vars(config).items()
    }


def never_called(spec: DecoderSpec) -> set[int]:
    """Return ids of modules that only parameters are taken of; whoever read them saw to that."""
    found = {id(r.ref.module) for r in spec.rotaries if isinstance(r, RotaryLookup)}
    if spec.positions is not None:
        found.add(id(spec.positions.ref.module))
    for layer in spec.layers:
        found |= {id(ref.module) for ref in _sinks(layer.attention)}
        if isinstance(layer.mlp, ExpertsSpec):
            found |= {id(layer.mlp.ref.module), id(layer.mlp.router.ref.module)}
            if layer.mlp.router.correction is not None:
                found.add(id(layer.mlp.router.correction[0].module))
    return found


class ModuleWatch:
    """Snapshot of the modules and tensors that a plan was built on.

    Args:
        root: the model that owns the modules; kept only through its module tree's dictionaries.
        spec: the spec read from it; None watches the tensors of every module.
        beside: modules of the model that the spec stands for nothing of, which are not watched.
    """

    def __init__(
        self, root: nn.Module, spec: DecoderSpec | None, beside: Iterable[nn.Module] = ()
    ) -> None:
        ignored = {id(module) for module in beside}
        modules = [module for module in root.modules() if id(module) not in ignored]
        # The root is kept by nobody here; of others that are gone their parents tell.
        self._root = weakref.ref(root)
        self._inner = [module for module in modules if module is not root]
        refs = root.modules() if spec is None else (ref.module for ref in spec_modules(spec))
        owned = {id(module) for owner in refs for module in owner.modules()}
        # The model's own calls replace them.
        unread: dict[int, list[str]] = {}
        for rotary, change in () if spec is None else changing_rotaries(spec):
            unread.setdefault(id(rotary.ref.module), []).append(change.live)
        self._child_dicts = [parent._modules for parent in modules if parent._modules]
        self._seen_children = [dict(children) for children in self._child_dicts]
        self._childless = [parent._modules for parent in modules if not parent._modules]
        # The root's own forward and hooks concern HF's call, which generate() also makes.
        self._call_dicts = [parent.__dict__ for parent in modules]
        self._hook_dicts: list[dict[int, object]] = []
        tensors: list[tuple[dict[str, Any], str]] = []
        absent: list[tuple[dict[str, Any], str]] = []
        for parent in modules:
            self._hook_dicts += hook_dicts(parent)
            if id(parent) in owned:
                stores: tuple[dict[str, Any], ...] = (parent._parameters, parent._buffers)
                skipped = unread.get(id(parent), ())
                for store in stores:
                    absent += [(store, n) for n, t in store.items() if t is None]
                    tensors += [
                        (store, n) for n, t in store.items() if t is not None and n not in skipped
                    ]
        self._tensors, self._absent = _Entries(tensors), _Entries(absent)
        self._constants = _Entries(
            (parent.__dict__, name)
            for parent in modules
            if not isinstance(parent, nn.Linear | nn.Embedding)
            for name, value in parent.__dict__.items()
            # What a rotary module of dynamic length remembers is of no consequence here.
            if type(value) in (int, float)
            and not name.endswith("max_seq_len_cached")
            or type(value) is bool
            and _is_constant(parent, name)
        )
        self._configs = _ConfigWatch(modules)
        # PEFT's wrappers, which compute something else when adapters are switched.
        self._adapted: list[Any] = [m for m in modules if hasattr(m, "_disable_adapters")]
        self._variants: dict[tuple[object, ...], int] = {}
        self._num_variants = 0
        self._seen_structure = self._structure()

    def _structure(self) -> tuple[object, ...]:
        forwards: tuple[tuple[int, int], ...] = ()
        hooks = forwards
        if any(map(contains, self._call_dicts, repeat("forward"))):
            forwards = tuple(
                (i, id(d["forward"])) for i, d in enumerate(self._call_dicts) if "forward" in d
            )
        if any(self._hook_dicts):
            hooks = tuple(
                (i, id(hook))
                for i, held in enumerate(self._hook_dicts)
                if held
                for hook in held.values()
                if not is_gradient_hook(hook)
            )
        classes = tuple(map(type, self._inner))
        return forwards, hooks, type(self._root()), classes, tuple(self._constants.now())

    def structure_changed(self) -> bool:
        """Say whether modules, classes, hooks, own forwards, numbers or configs have changed."""
        if any(self._childless) or not all(map(eq, self._child_dicts, self._seen_children)):
            return True
        if not all(map(is_, self._absent.now(), repeat(None))):
            return True
        return self._configs.changed() or self._structure() != self._seen_structure

    def variant(self) -> int:
        """Return a number that is equal for equal states of all adapters.

        Adapters that are merged and disabled are taken out of the weights first, as PEFT does it
        in its next forward.
        """
        if not self._adapted:
            return 0
        for module in self._adapted:
            if module._disable_adapters and getattr(module, "merged_adapters", None):
                module.unmerge()
        state = tuple(_adapter_state(module) for module in self._adapted)
        number = self._variants.get(state)
        if number is None:
            if len(self._variants) == _MAX_VARIANTS:
                del self._variants[next(iter(self._variants))]
            self._num_variants += 1
            number = self._variants[state] = self._num_variants
        return number

    def tensors(self) -> list[Tensor]:
        """Return the watched parameters and buffers, as they are now."""
        return [tensor for tensor in self._tensors.now() if tensor is not None]

    def storage_key(self) -> tuple[int, ...]:
        """Return the data pointers of all tensors: equal keys may share a binding and a graph."""
        try:
            return tuple(map(_data_ptr, self._tensors.now()))
        except TypeError:  # one is gone
            return tuple(0 if t is None else t.data_ptr() for t in self._tensors.now())
