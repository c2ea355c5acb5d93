"""Binding of routers and experts to the parameters of their modules, where they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_paged.decoder.inputs import Binding, Call, StepInputs, Values
from torch_paged.decoder.plan_experts import Experts, Route, SigmoidGate
from torch_paged.decoder.spec import ModuleRef
from torch_paged.ops.unchecked import experts, fused_linear, route_experts


def _parameter(ref: ModuleRef, name: str) -> Tensor | None:
    parameter = getattr(ref.module, name, None)
    return None if parameter is None else parameter.detach()


def bind_route(ins: Route, binding: Binding) -> Call:
    """Logits of all experts, then the choice."""
    spec, source, (weights, ids) = ins.spec, ins.source, ins.targets
    matrix, bias = _parameter(spec.ref, "weight"), _parameter(spec.ref, "bias")
    assert matrix is not None
    correction = None
    if spec.correction is not None:
        correction = _parameter(*spec.correction)
        assert correction is not None
        correction = correction.view(-1)
    counters, float_logits = binding.state.linear_counters, spec.float_logits
    matrices, biases = [matrix], [bias]

    def call(values: Values, inputs: StepInputs) -> None:
        x = values[source]
        if float_logits:
            logits = nn.functional.linear(
                x.float(), matrix.float(), None if bias is None else bias.float()
            )
        else:
            logits = fused_linear(x, matrices, biases, counters=counters)
        values[weights], values[ids] = route_experts(
            logits,
            spec.top_k,
            spec.scoring,
            spec.normalise,
            spec.scale,
            correction,
            spec.float_weights,
            spec.num_groups,
            spec.top_groups,
            spec.group_best,
        )

    return call


def bind_experts(ins: Experts) -> Call:
    """The experts over the model's own matrices; transposed ones are read through a view."""
    spec, source, (weights, ids) = ins.spec, ins.source, ins.routing
    target, residual = ins.target, ins.residual
    gate_up, down = _parameter(spec.ref, "gate_up_proj"), _parameter(spec.ref, "down_proj")
    assert gate_up is not None and down is not None
    if spec.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    gate_up_bias = _parameter(spec.ref, "gate_up_proj_bias")
    down_bias = _parameter(spec.ref, "down_proj_bias")

    def call(values: Values, inputs: StepInputs) -> None:
        values[target] = experts(
            values[source],
            values[ids],
            values[weights],
            gate_up,
            down,
            gate_up_bias,
            down_bias,
            spec.activation,
            spec.interleaved,
            spec.alpha,
            spec.limit,
            None if residual is None else values[residual],
        )

    return call


def bind_sigmoid_gate(ins: SigmoidGate) -> Call:
    gate, source, target = ins.gate, ins.source, ins.target

    def call(values: Values, inputs: StepInputs) -> None:
        values[target] = torch.sigmoid(values[gate]) * values[source]

    return call
