"""Binding: a plan over names becomes a list of callables over the model's own tensors.

Parameters are read from their modules here, so a replaced parameter needs a new binding and a
changed value needs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from torch_paged.decoder.bind_attention import bind_decode_attention, bind_prefill_attention
from torch_paged.decoder.bind_experts import bind_experts, bind_route, bind_sigmoid_gate
from torch_paged.decoder.bind_latent import bind_latent_decode, bind_latent_prefill
from torch_paged.decoder.bind_linear import bind_linear, call_module
from torch_paged.decoder.bind_rare import bind_add_positions, bind_clip, bind_look_up_rotary
from torch_paged.decoder.inputs import Binding, Call, StepInputs, Values, gain
from torch_paged.decoder.plan import (
    Activate,
    Add,
    Attention,
    Embed,
    Glu,
    Instruction,
    Linear,
    LogitTransform,
    Norm,
    Plan,
    RotaryTable,
    SelectLast,
)
from torch_paged.decoder.plan_experts import CallBlock, Experts, Route, SigmoidGate
from torch_paged.decoder.plan_latent import LatentAttention
from torch_paged.decoder.plan_rare import AddPositions, Clip, LookUpRotary
from torch_paged.decoder.rotary import inverse_frequencies, long_frequencies
from torch_paged.decoder.slots import plain_slot
from torch_paged.decoder.spec import RotaryChange
from torch_paged.ops.unchecked import (
    activation,
    add_rms_norm,
    embed,
    glu,
    rms_norm,
    rms_norm_add,
    rotary_by_span,
    rotary_table,
)


class Visitor(Protocol):
    """Sees a plan run, one instruction after the other."""

    def before(self, instruction: Instruction, values: Values) -> None:
        """See an instruction that is about to read its sources from `values`."""
        ...

    def after(self, instruction: Instruction, values: Values) -> None:
        """See an instruction that has just written its targets to `values`."""
        ...


class BoundPlan:
    """A plan ready to run: ``bound(inputs) -> logits [num_rows, vocab_size]``."""

    __slots__ = ("_program", "_result", "plan")

    def __init__(self, plan: Plan, program: list[tuple[Call, tuple[str, ...]]]) -> None:
        self.plan = plan
        self._program = program
        self._result = plan.result

    def __call__(self, inputs: StepInputs) -> Tensor:
        values: Values = {}
        for call, dead in self._program:
            call(values, inputs)
            for name in dead:
                del values[name]
        return values[self._result]

    def walk(self, inputs: StepInputs, visitor: Visitor) -> Tensor:
        """Run the plan and show it to `visitor`, which may replace values; keeps them all."""
        values: Values = {}
        for instruction, (call, _) in zip(self.plan.instructions, self._program, strict=True):
            visitor.before(instruction, values)
            call(values, inputs)
            visitor.after(instruction, values)
        return values[self._result]


def bind_plan(plan: Plan, binding: Binding) -> BoundPlan:
    """Bind every instruction of `plan`; values are dropped after their last use."""
    last_use = {name: i for i, ins in enumerate(plan.instructions) for name in ins.sources}
    program = []
    for index, instruction in enumerate(plan.instructions):
        dead = tuple(n for n in dict.fromkeys(instruction.sources) if last_use[n] == index)
        unread = tuple(n for n in instruction.targets if n not in last_use and n != plan.result)
        program.append((_bind(instruction, plan.mode, binding), dead + unread))
    return BoundPlan(plan, program)


def _bind(instruction: Instruction, mode: Literal["decode", "prefill"], binding: Binding) -> Call:
    decode = mode == "decode"
    match instruction:
        case Embed():
            return _bind_embed(instruction, decode, binding)
        case AddPositions():
            return bind_add_positions(instruction, decode, binding)
        case LookUpRotary():
            return bind_look_up_rotary(instruction, decode, binding)
        case RotaryTable():
            return _bind_rotary(instruction, decode, binding)
        case Norm():
            return _bind_norm(instruction, decode)
        case Linear():
            return bind_linear(instruction, decode, binding)
        case Attention():
            if decode:
                return bind_decode_attention(instruction, binding)
            return bind_prefill_attention(instruction, binding)
        case LatentAttention():
            if decode:
                return bind_latent_decode(instruction, binding)
            return bind_latent_prefill(instruction, binding)
        case Glu():
            return _bind_glu(instruction)
        case Add():
            return _bind_add(instruction)
        case Activate():
            return _bind_activate(instruction)
        case Clip():
            return bind_clip(instruction)
        case Route():
            return bind_route(instruction, binding)
        case Experts():
            return bind_experts(instruction)
        case SigmoidGate():
            return bind_sigmoid_gate(instruction)
        case CallBlock():
            return _bind_call_block(instruction, decode)
        case SelectLast():
            return _bind_select_last(instruction)
        case LogitTransform():
            return _bind_logit_transform(instruction)


def _bind_call_block(ins: CallBlock, decode: bool) -> Call:
    module, source, target = ins.ref.module, ins.source, ins.target

    def block(x: Tensor) -> Tensor:
        out = module(x)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first

    def call(values: Values, inputs: StepInputs) -> None:
        x = values[source]
        values[target] = block(x.unsqueeze(1 if decode else 0)).reshape(x.shape).contiguous()

    return call


def _bind_embed(ins: Embed, decode: bool, binding: Binding) -> Call:
    target, multiplier = ins.target, ins.multiplier
    look_up = _bind_look_up(ins, decode, binding)

    def call(values: Values, inputs: StepInputs) -> None:
        embedded = look_up(inputs) if inputs.embeddings is None else inputs.embeddings
        values[target] = embedded if multiplier == 1.0 else embedded * multiplier

    return call


def _bind_look_up(ins: Embed, decode: bool, binding: Binding) -> Callable[[StepInputs], Tensor]:
    module = ins.ref.module
    last_token = binding.state.last_token
    plain = type(module) is nn.Embedding or plain_slot(module).kind == "fused"
    if not plain or module.weight.stride(-1) != 1:
        call = call_module(module, decode)

        def opaque(inputs: StepInputs) -> Tensor:
            ids = last_token[inputs.slots.clamp(min=0)] if decode else inputs.ids
            assert ids is not None
            return call(ids)

        return opaque
    weight, scale = module.weight.detach(), ins.scale

    def own(inputs: StepInputs) -> Tensor:
        if decode:
            return embed(last_token, inputs.slots, weight, scale=scale)
        assert inputs.ids is not None
        return embed(inputs.ids, None, weight, scale=scale)

    return own


def _bind_rotary(ins: RotaryTable, decode: bool, binding: Binding) -> Call:
    if ins.spec.change is not None:
        return _bind_changing_rotary(ins, ins.spec.change, decode, binding)
    inv_freq = inverse_frequencies(ins.spec)
    scaling = ins.spec.scaling
    cos, sin = ins.targets
    positions = binding.state.positions

    def call(values: Values, inputs: StepInputs) -> None:
        if decode:
            values[cos], values[sin] = rotary_table(
                positions, inputs.slots, inv_freq, scaling=scaling
            )
        else:
            assert inputs.positions is not None
            values[cos], values[sin] = rotary_table(
                inputs.positions, None, inv_freq, scaling=scaling
            )

    return call


def _bind_changing_rotary(
    ins: RotaryTable, change: RotaryChange, decode: bool, binding: Binding
) -> Call:
    inv_freq = inverse_frequencies(ins.spec)
    long = long_frequencies(ins.spec, inv_freq)
    cos, sin = ins.targets
    state = binding.state
    named = {
        "limit": change.limit,
        "base": change.base,
        "factor": change.factor,
        "scaling": ins.spec.scaling,
    }

    def call(values: Values, inputs: StepInputs) -> None:
        if decode:
            rows = (state.positions, inputs.slots, state.rotary_leads, state.rotary_floors)
            values[cos], values[sin] = rotary_by_span(*rows, inv_freq, long, **named)
        else:
            assert inputs.positions is not None and inputs.spans is not None
            tokens = (inputs.positions, None, None, inputs.spans)
            values[cos], values[sin] = rotary_by_span(*tokens, inv_freq, long, **named)

    return call


def _bind_norm(ins: Norm, decode: bool) -> Call:
    spec, source, target = ins.spec, ins.source, ins.target
    module = spec.ref.module
    if plain_slot(module).kind == "opaque":
        call = call_module(module, decode)

        def opaque(values: Values, inputs: StepInputs) -> None:
            values[target] = call(values[source])

        return opaque
    if spec.kind == "layer":
        return _bind_layer_norm(ins)
    weight, eps, offset, cast = gain(spec), spec.eps, spec.offset, spec.cast_before_gain
    residual, summed, after = ins.residual, ins.summed, ins.added
    if after is not None:

        def before_add(values: Values, inputs: StepInputs) -> None:
            x, other = values[source], values[after]
            values[target] = rms_norm_add(
                x, other, weight, eps=eps, offset=offset, cast_before_gain=cast
            )

        return before_add
    if residual is None or summed is None:

        def plain(values: Values, inputs: StepInputs) -> None:
            values[target] = rms_norm(
                values[source], weight, eps=eps, offset=offset, cast_before_gain=cast
            )

        return plain

    def added(values: Values, inputs: StepInputs) -> None:
        values[target], values[summed] = add_rms_norm(
            values[source], values[residual], weight, eps=eps, offset=offset, cast_before_gain=cast
        )

    return added


def _bind_layer_norm(ins: Norm) -> Call:
    source, target = ins.source, ins.target
    weight, eps, offset = gain(ins.spec), ins.spec.eps, ins.spec.offset
    bias = getattr(ins.spec.ref.module, "bias", None)
    bias = None if bias is None else bias.detach()

    def call(values: Values, inputs: StepInputs) -> None:
        x = values[source]
        gained = weight if weight is None or not offset else weight + offset
        if gained is not None and gained.dtype != x.dtype:
            wide = nn.functional.layer_norm(x.float(), x.shape[-1:], gained.float(), bias, eps)
            values[target] = wide.to(x.dtype)
        else:
            values[target] = nn.functional.layer_norm(x, x.shape[-1:], gained, bias, eps)

    return call


def _bind_glu(ins: Glu) -> Call:
    names, target, act = ins.projections, ins.target, ins.activation

    def call(values: Values, inputs: StepInputs) -> None:
        if len(names) == 2:
            gate, up = values[names[0]], values[names[1]]
        else:
            gate, up = values[names[0]].chunk(2, dim=-1)
        values[target] = glu(gate, up, activation=act)

    return call


def _bind_add(ins: Add) -> Call:
    left, right, target, multiplier = ins.left, ins.right, ins.target, ins.multiplier

    def call(values: Values, inputs: StepInputs) -> None:
        added = values[right] if multiplier == 1.0 else values[right] * multiplier
        values[target] = values[left] + added

    return call


def _bind_activate(ins: Activate) -> Call:
    source, target, act = ins.source, ins.target, ins.activation

    def call(values: Values, inputs: StepInputs) -> None:
        values[target] = activation(values[source], activation=act)

    return call


def _bind_select_last(ins: SelectLast) -> Call:
    source, target = ins.source, ins.target

    def call(values: Values, inputs: StepInputs) -> None:
        assert inputs.last_index is not None
        values[target] = values[source].index_select(0, inputs.last_index)

    return call


def _bind_logit_transform(ins: LogitTransform) -> Call:
    source, target, scale, softcap = ins.source, ins.target, ins.scale, ins.softcap

    def call(values: Values, inputs: StepInputs) -> None:
        values[target] = _transform_logits(values[source], scale, softcap)

    return call


def _transform_logits(logits: Tensor, scale: float, softcap: float) -> Tensor:
    if not math.isclose(scale, 1.0):
        logits = logits * scale
    return torch.tanh(logits / softcap) * softcap if softcap else logits
