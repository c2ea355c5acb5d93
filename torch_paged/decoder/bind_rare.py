"""Binding of the instructions that few families need."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from torch_paged.decoder.inputs import Binding, Call, StepInputs, Values
from torch_paged.decoder.plan_rare import AddPositions, Clip, LookUpRotary
from torch_paged.ops.unchecked import embed


def _rows_by_position(
    table: Tensor, decode: bool, binding: Binding
) -> Callable[[StepInputs], Tensor]:
    """Return the reader of the rows of `table` [num_positions, width] of a step's tokens."""
    positions = binding.state.positions

    def read(inputs: StepInputs) -> Tensor:
        if decode:
            return embed(positions, inputs.slots, table, scale=1.0)
        assert inputs.positions is not None
        return embed(inputs.positions, None, table, scale=1.0)

    return read


def bind_add_positions(ins: AddPositions, decode: bool, binding: Binding) -> Call:
    """Look the rows of learned positions up, and add them."""
    module, offset = ins.spec.ref.module, ins.spec.offset
    source, target = ins.source, ins.target
    read = _rows_by_position(module.weight.detach()[offset:], decode, binding)

    def call(values: Values, inputs: StepInputs) -> None:
        values[target] = values[source] + read(inputs)

    return call


def bind_look_up_rotary(ins: LookUpRotary, decode: bool, binding: Binding) -> Call:
    """Look sines and cosines up; attention takes them in float32."""
    cos, sin = ins.targets
    table = getattr(ins.spec.ref.module, ins.spec.buffer).detach()
    read = _rows_by_position(table, decode, binding)

    def call(values: Values, inputs: StepInputs) -> None:
        sines, cosines = read(inputs).float().chunk(2, dim=-1)
        values[cos], values[sin] = cosines.contiguous(), sines.contiguous()

    return call


def bind_clip(ins: Clip) -> Call:
    """Clamp a projection, in a tensor of its own."""
    source, target, bound = ins.source, ins.target, ins.bound

    def call(values: Values, inputs: StepInputs) -> None:
        values[target] = values[source].clamp(-bound, bound)

    return call
