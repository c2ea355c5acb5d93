"""The step of a decoder: bound plans for prefill and for decode at small and large batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torch_paged.cache.pool import LayerShape
from torch_paged.decoder.bind import BoundPlan, Visitor, bind_plan
from torch_paged.decoder.fusion import FusionProfile, Pays, always, fuse
from torch_paged.decoder.host import MAX_HOST_ROWS, HostStep, Unsupported
from torch_paged.decoder.inputs import Binding, StepInputs
from torch_paged.decoder.linears import linear_slot
from torch_paged.decoder.lowering import lower
from torch_paged.decoder.plan import Mode, Plan
from torch_paged.decoder.rotary import changes_with_length, first_floor, remember
from torch_paged.decoder.slots import Slot, SlotKind, is_conv1d, plain_slot
from torch_paged.decoder.spec import (
    DecoderSpec,
    ExpertsSpec,
    LinearSpec,
    MlpSpec,
    OpaqueMlpSpec,
)
from torch_paged.decoder.watch import ModuleWatch, never_called, spec_modules
from torch_paged.log import debug_once
from torch_paged.ops.fused_linear import (
    ALWAYS_KERNEL_ROWS,
    MAX_KERNEL_ROWS,
    folds,
    token_bucket,
)

# Plans held; where adapters are in a new state before each call, all are made anew from time to
# time, and the graphs with them.
_MAX_BOUND = 96


class SlotRow(NamedTuple):
    """One row of the report: a module, how it takes part, and why it is not fused."""

    name: str
    kind: SlotKind
    why: str


def _num_weights(*linears: LinearSpec) -> int:
    return sum(p.numel() for linear in linears for p in linear.ref.module.parameters())


def _mlp_weights(mlp: MlpSpec | ExpertsSpec | OpaqueMlpSpec) -> int:
    """Return how many weights one token meets; of a block of its own making, all."""
    if isinstance(mlp, MlpSpec):
        return _num_weights(*mlp.inputs, mlp.output)
    if isinstance(mlp, OpaqueMlpSpec):
        return sum(p.numel() for p in mlp.ref.module.parameters())
    shared = 0 if mlp.shared is None else _mlp_weights(mlp.shared)
    experts = sum(p.numel() for p in mlp.ref.module.parameters()) // mlp.router.num_experts
    return shared + mlp.router.top_k * experts


class DecoderStep:
    """Runs the plans of one spec over one cache binding; rebinds when the weights moved.

    Args:
        root: the model, watched for replaced modules, hooks and moved parameters.
        spec: what `patches` read from it.
        beside: modules of the model that are called as they are, beside all steps.
        fuse_linears: None folds a linear's neighbours into it on CUDA where the op has a kernel
            that pays at the number of rows; a bool forces it for all.
    """

    # The keys and values of a spec are those that the model keeps in a cache of its own.
    fills_caches = True
    # All that its layers keep is keys and values.
    keeps_state = False

    def __init__(
        self,
        root: nn.Module,
        spec: DecoderSpec,
        *,
        beside: Iterable[nn.Module] = (),
        fuse_linears: bool | None = None,
    ) -> None:
        self.spec = spec
        self.watch = ModuleWatch(root, spec, beside)
        self._fuse_linears = fuse_linears
        # Sees every run, op by op, and may replace values; a plan's host form is passed by.
        self.visitor: Visitor | None = None
        self._binding: Binding | None = None
        # By variant too: graphs of another variant read what its plans hold.
        self._bound: dict[tuple[Mode, int, int], BoundPlan] = {}
        self._host: dict[tuple[int, int], HostStep | None] = {}
        self._key: tuple[object, ...] = ()
        self._variant = 0
        self._has_spans = changes_with_length(spec)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the residual stream, and of the cache unless configured otherwise."""
        dtype: torch.dtype = self.spec.embedding.module.weight.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self.spec.embedding.module.weight.device
        return device

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def layer_flops(self) -> float:
        """Operations of the projections of one token in a layer, about."""
        layers = self.spec.layers
        weights = sum(
            _num_weights(*layer.attention.linears) + _mlp_weights(layer.mlp) for layer in layers
        )
        return 2.0 * weights / max(len(layers), 1)

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """Cache shape of every layer."""
        return tuple(LayerShape(*layer.attention.cache_dims) for layer in self.spec.layers)

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """Window of every layer, 0 where it sees all tokens."""
        return tuple(layer.attention.window for layer in self.spec.layers)

    @property
    def has_window(self) -> bool:
        """Say whether any layer attends to a window only."""
        return any(self.layer_windows)

    @property
    def cache_repeats(self) -> int:
        """How often the model's own cache holds each head of keys and values."""
        return self.spec.cache_repeats

    @property
    def counts_columns(self) -> bool:
        """Say whether distances between tokens count what the mask hides between them."""
        return self.spec.counts_columns

    @property
    def max_positions(self) -> int:
        """Positions are below this; 0 where there is no end."""
        return self.spec.max_positions

    def bind(self, binding: Binding) -> None:
        """Use these state and cache tensors from now on."""
        self._binding = binding
        self._forget()

    def unbind(self) -> None:
        """Forget the binding and every tensor that it kept alive."""
        self._binding = None
        self._forget()

    def _forget(self) -> None:
        self._bound.clear()
        self._host.clear()

    def refresh(self) -> bool:
        """Rebind if parameters moved since the last run, and say whether they had."""
        # First: it may take an adapter out of the weights.
        variant = self.watch.variant()
        key = self.watch.storage_key()
        moved = key != self._key or len(self._bound) > _MAX_BOUND
        self._key, self._variant = key, variant
        if moved:
            self._forget()
        return moved

    @property
    def has_spans(self) -> bool:
        """Say whether rotary frequencies depend on the length of the sequence."""
        return self._has_spans

    def recomputes(self, num_prompt_tokens: int, max_new_tokens: int) -> bool:
        """Say whether generate() of the model computes such a sequence anew on its way."""
        limit = self.spec.recompute_length
        return 0 < limit and num_prompt_tokens <= limit < num_prompt_tokens + max_new_tokens - 1

    def first_floor(self, span: Tensor) -> Tensor:
        """Return the least length, int64 [], that a batch of prompts up to `span` counts with."""
        return first_floor(self.spec, span)

    def remember_spans(self, first: Tensor, last: Tensor) -> None:
        """Leave in the model what forwards over lengths from `first` to `last` leave there."""
        remember(self.spec, first, last)

    @property
    def variant(self) -> int:
        """Number of the state of the model's adapters as of the last `refresh`."""
        return self._variant

    @property
    def storage_key(self) -> tuple[object, ...]:
        """Data pointers of the parameters as of the last `refresh`."""
        return self._key

    def tensors(self) -> Sequence[Tensor]:
        """Return the parameters and buffers that a step reads."""
        return self.watch.tensors()

    def plan(self, mode: Mode, num_rows: int) -> Plan:
        """Return the plan that serves `num_rows` rows in `mode`."""
        return self._plan(mode, self._fused_rows(mode, num_rows))

    def _plan(self, mode: Mode, fused_rows: int) -> Plan:
        linears: Pays | None = None
        if fused_rows:
            linears = always
        if fused_rows > ALWAYS_KERNEL_ROWS:
            linears = partial(folds, self.device, self.dtype, fused_rows)
        return fuse(lower(self.spec, mode), FusionProfile(linears))

    def _fused_rows(self, mode: Mode, num_rows: int) -> int:
        """Return up to how many rows the plan folds neighbours into its linears; 0: it does not.

        One plan serves all numbers of rows that this rounds up to the same.
        """
        forced = self._fuse_linears
        if mode == "prefill" or forced is False:
            return 0
        if forced:
            return ALWAYS_KERNEL_ROWS
        if self.device.type != "cuda" or num_rows > MAX_KERNEL_ROWS:
            return 0
        return max(token_bucket(num_rows), ALWAYS_KERNEL_ROWS)

    def _bound_plan(self, mode: Mode, fused_rows: int) -> BoundPlan:
        key = (mode, fused_rows, self._variant)
        bound = self._bound.get(key)
        if bound is None:
            if self._binding is None:
                raise RuntimeError("DecoderStep.bind must be called before a step runs")
            bound = bind_plan(self._plan(mode, fused_rows), self._binding)
            self._bound[key] = bound
        return bound

    @property
    def cache_layers(self) -> Sequence[int]:
        """Of each layer, its number in the model's own cache."""
        return range(len(self.spec.layers))

    def fill_states(self, cache: object, slots: Tensor) -> None:
        """Do nothing: there is no state besides keys and values."""

    def copy_states(self, sources: Tensor, targets: Tensor) -> None:
        """Do nothing: there is no state besides keys and values."""

    def prefill(self, inputs: StepInputs) -> Tensor:
        """Run packed prompt chunks; returns logits [len(last_index), vocab_size]."""
        return self._run("prefill", 0, inputs)

    def extend(self, inputs: StepInputs) -> Tensor:
        """Run a few tokens behind cached ones: a prefill with the linears of a decode step."""
        assert inputs.ids is not None
        return self._run("prefill", self._fused_rows("decode", inputs.ids.shape[0]), inputs)

    def _run(self, mode: Mode, fused_rows: int, inputs: StepInputs) -> Tensor:
        bound = self._bound_plan(mode, fused_rows)
        return bound(inputs) if self.visitor is None else bound.walk(inputs, self.visitor)

    def decode(self, slots: Tensor) -> Tensor:
        """Run one token of each row of `slots` [num_rows]; returns logits [num_rows, vocab]."""
        few = slots.device.type == "cpu" and slots.shape[0] <= MAX_HOST_ROWS
        if few and self.visitor is None:
            slot_list = slots.tolist()
            host = self._host_step(len(slot_list))
            if host is not None and min(slot_list) >= 0:
                return host(slot_list)
        fused_rows = self._fused_rows("decode", slots.shape[0])
        return self._run("decode", fused_rows, StepInputs(slots))

    def _host_step(self, num_rows: int) -> HostStep | None:
        """Return the CPU form of the step for few rows; None where the plan has none."""
        key = (num_rows, self._variant)
        if key not in self._host:
            if self._binding is None:
                raise RuntimeError("DecoderStep.bind must be called before a step runs")
            try:
                plan = self.plan("decode", num_rows)
                self._host[key] = HostStep(plan, self._binding, num_rows)
            except Unsupported as reason:
                self._host[key] = None
                debug_once(f"the decode step has no host form: {reason}")
        return self._host[key]

    def slot_rows(self) -> Sequence[SlotRow]:
        """Describe every module of the plan for the report."""
        rows = []
        read = never_called(self.spec)
        mlps = [layer.mlp for layer in self.spec.layers]
        called = {id(m.ref.module): m.why for m in mlps if isinstance(m, OpaqueMlpSpec)}
        for ref in spec_modules(self.spec):
            linear = isinstance(ref.module, nn.Linear) or hasattr(ref.module, "base_layer")
            linear = linear or is_conv1d(ref.module)
            slot = linear_slot(ref.module) if linear else plain_slot(ref.module)
            slot = Slot("fused") if id(ref.module) in read else slot
            if id(ref.module) in called:
                slot = Slot("opaque", called[id(ref.module)])
            rows.append(SlotRow(ref.name, slot.kind, slot.why))
        return rows
