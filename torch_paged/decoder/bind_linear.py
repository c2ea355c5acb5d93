"""Binding of linears: plain, under adapters, fused with their neighbours, or called."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torch_paged.decoder.inputs import Binding, Call, StepInputs, Values, gain
from torch_paged.decoder.linears import HeldLinear, held_linear, linear_slot
from torch_paged.decoder.plan import Join, Linear
from torch_paged.decoder.spec import NormSpec
from torch_paged.ops.unchecked import fused_linear, joined_linear, lora_expand_, lora_shrink


def call_module(module: nn.Module, decode: bool) -> Callable[[Tensor], Tensor]:
    """Call an opaque module with the rank it expects: [rows, 1, hidden] or [1, tokens, hidden].

    What it returns may be transposed, say; kernels read contiguous rows.
    """
    dim = 1 if decode else 0
    return lambda x: module(x.unsqueeze(dim)).squeeze(dim).contiguous()


def bind_linear(ins: Linear, decode: bool, binding: Binding) -> Call:
    """Bind projections of one source, fused or one by one."""
    if ins.joined is not None:
        return _bind_joined_linear(ins, ins.joined, binding)
    folded = (ins.norm, ins.activation, ins.residual) != (None, None, None)
    if folded or ins.one_kernel:
        return _bind_fused_linear(ins, binding)
    source, targets = ins.source, ins.targets
    calls: list[tuple[str, Callable[[Tensor], Tensor]]] = []
    for target, part in zip(targets, ins.parts, strict=True):
        module = part.ref.module
        if linear_slot(module).kind != "opaque":
            calls.append((target, _own_linear(held_linear(module))))
        else:
            calls.append((target, call_module(module, decode)))

    def call(values: Values, inputs: StepInputs) -> None:
        x = values[source]
        for target, linear in calls:
            values[target] = linear(x)

    return call


def _own_linear(held: HeldLinear) -> Callable[[Tensor], Tensor]:
    weight = held.weight
    bias = None if held.base.bias is None else held.base.bias.detach()
    linear = nn.functional.linear
    if not held.updates:
        return lambda x: linear(x, weight, bias)
    updates = [(u.down.weight.detach(), u.up.weight.detach(), u.scaling) for u in held.updates]
    if _have_ops(held):

        def expanded(x: Tensor) -> Tensor:
            out = linear(x, weight, bias)
            for down, up, scaling in updates:
                lora_expand_(out, lora_shrink(x, [down]), up, scaling)
            return out

        return expanded

    def updated(x: Tensor) -> Tensor:
        out = linear(x, weight, bias)
        dtype = out.dtype
        for down, up, scaling in updates:
            x = x.to(down.dtype)
            out = out + linear(linear(x, down), up) * scaling
        return out.to(dtype)

    return updated


def _have_ops(held: HeldLinear) -> bool:
    """Say whether our ops add the updates and round where PEFT rounds."""
    own = {held.base.weight.dtype}
    dtypes = {update.dtype for update in held.updates}
    # PEFT adds several in the wider dtype before it rounds.
    fits = dtypes == own or (dtypes == {torch.float32} and len(held.updates) == 1)
    return fits and all(update.up.weight.is_contiguous() for update in held.updates)


def _bind_fused_linear(ins: Linear, binding: Binding) -> Call:
    counters = binding.state.linear_counters
    held = [held_linear(part.ref.module) for part in ins.parts]
    weights, biases = _bound_weights(ins, held)
    downs, updates, scales = _bound_updates(held)
    sizes = [weight.shape[0] for weight in weights]
    source, targets, residual = ins.source, ins.targets, ins.residual
    prologue = _bound_norm(ins.norm)
    act, gated = ins.activation or "", ins.gated

    def call(values: Values, inputs: StepInputs) -> None:
        x = values[source]
        out = fused_linear(
            x,
            weights,
            biases,
            *prologue,
            residual=None if residual is None else values[residual],
            activation=act,
            gated=gated,
            counters=counters,
            updates=updates,
            update_scales=scales,
            downs=downs,
        )
        if len(targets) == 1:
            values[targets[0]] = out
        else:
            values.update(zip(targets, out.split(sizes, dim=-1), strict=True))

    return call


def _bind_joined_linear(ins: Linear, joined: Join, binding: Binding) -> Call:
    counters = binding.state.linear_counters
    weights, biases = _bound_weights(ins, [held_linear(part.ref.module) for part in ins.parts])
    sizes = [weight.shape[0] for weight in weights]
    source, added, summed, outputs = ins.source, joined.added, joined.summed, ins.outputs
    weight, _, *join = _bound_norm(joined.spec)
    prologue = _bound_norm(ins.norm)
    act, gated = ins.activation or "", ins.gated

    def call(values: Values, inputs: StepInputs) -> None:
        out, values[summed] = joined_linear(
            values[source],
            values[added],
            weight,
            *join,
            weights,
            biases,
            *prologue,
            activation=act,
            gated=gated,
            counters=counters,
        )
        if len(outputs) == 1:
            values[outputs[0]] = out
        else:
            values.update(zip(outputs, out.split(sizes, dim=-1), strict=True))

    return call


def _bound_weights(
    ins: Linear, linears: list[HeldLinear]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the weights and the biases, of a gate and its up projection each its own."""
    weights = [linear.base.weight.detach() for linear in linears]
    biases = [None if h.base.bias is None else h.base.bias.detach() for h in linears]
    if ins.gated and len(linears) == 1:
        weights = list(weights[0].chunk(2))
        biases = [None, None] if biases[0] is None else list(biases[0].chunk(2))
    return weights, biases


def _bound_norm(norm: NormSpec | None) -> tuple[Tensor | None, bool, float, float, bool]:
    """Return the gain, whether there is a norm, eps, offset and cast: as the ops take them."""
    if norm is None:
        return None, False, 0.0, 0.0, True
    return gain(norm), True, norm.eps, norm.offset, norm.cast_before_gain


def _bound_updates(
    linears: list[HeldLinear],
) -> tuple[list[Tensor] | None, list[Tensor] | None, list[float]]:
    """Return the first and the second halves of the updates by linear, and their factors."""
    updates = [linear.updates[0] if linear.updates else None for linear in linears]
    present = [update for update in updates if update is not None]
    if not present:
        return None, None, []
    downs, ups = [], []
    for linear, update in zip(linears, updates, strict=True):
        rows, columns = linear.base.weight.shape
        none = linear.base.weight.new_empty((0,), dtype=present[0].dtype)
        downs.append(none.view(0, columns) if update is None else update.down.weight.detach())
        ups.append(none.view(rows, 0) if update is None else update.up.weight.detach())
    scales = [0.0 if update is None else update.scaling for update in updates]
    return downs, ups, scales
