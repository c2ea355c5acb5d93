"""Inputs of prompt steps: the same on their own and, padded, where graphs read them."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from torch_paged.decoder.inputs import StepInputs
from torch_paged.engine.prompt_inputs import PromptInputs, Room, StaticInputs

CPU = torch.device("cpu")
PADDING = {"slot_mappings": -1, "ids": 0, "positions": 0, "spans": 1}


def packed(
    draw: random.Random, lengths: list[int], decoding: int, scored: int, *, on_host: bool
) -> PromptInputs:
    """Make up pieces of these lengths; the values are told apart by where they stand."""
    count, hole = decoding, [-1] * (decoding > 0)
    bounds = list(np.cumsum([count, *lengths]))
    slots = draw.sample(range(100), len(lengths) + decoding)
    more = sorted(draw.sample(range(count, int(bounds[-1])), scored))

    def per_token(low: int, dtype: Any) -> Any:
        values = [-1] * count + [draw.randrange(low, low + 1000) for _ in range(sum(lengths))]
        array = np.array(values, dtype=dtype)
        return array if on_host else torch.from_numpy(array)

    return PromptInputs(
        slots=np.array(hole + slots[decoding:], dtype=np.int32),
        cu_seqlens=np.array([0] * len(hole) + bounds, dtype=np.int32),
        last_index=np.array([*range(count), *(b - 1 for b in bounds[1:]), *more], dtype=np.int64),
        slot_mappings=tuple(np.asarray(per_token(n * 5000, np.int64)) for n in (1, 2)),
        ids=per_token(20000, np.int64),
        positions=per_token(30000, np.int32),
        spans=per_token(40000, np.int32),
        ends=np.array(slots[:decoding] + slots[decoding:], dtype=np.int32),
        targets=np.array([draw.randrange(9) for _ in more], dtype=np.int64),
        num_decoding=decoding,
        lengths=tuple(lengths),
    )


def tokens_of(inputs: StepInputs) -> dict[str, torch.Tensor]:
    tensors = {name: getattr(inputs, name) for name in ("ids", "positions", "spans")}
    tensors |= {f"slot_mappings {i}": m for i, m in enumerate(inputs.slot_mappings)}
    return tensors


@pytest.mark.parametrize(
    ("decoding", "on_host"), [(0, True), (0, False), (1, True), (5, True)], ids=str
)
def test_static_inputs_hold_a_step_and_padding(decoding: int, on_host: bool) -> None:
    draw = random.Random(decoding)
    room = Room(tokens=64, pieces=6, decoding=8 if decoding else 0, scored=10)
    static = StaticInputs(room, 2, CPU, has_spans=True, tokens_on_host=on_host)
    pointers = [t.data_ptr() for t in tokens_of(static.inputs).values()]
    for _ in range(30):
        lengths = [draw.randint(1, 10) for _ in range(draw.randint(1, 6))]
        new = packed(draw, lengths, decoding, draw.randint(0, 1), on_host=on_host)
        # What a step before this one has left.
        for tensor in (static._words, *tokens_of(static.inputs).values()):
            tensor.random_(-(2**31), 2**31 - 1)
        static.load(new)
        there, ends, targets = new.on_device(CPU)
        inputs, shift, total = static.inputs, room.decoding - decoding, sum(lengths)
        for name, values in tokens_of(there).items():
            held = tokens_of(inputs)[name][room.decoding :]
            assert torch.equal(held[:total], values[decoding:]), name
            assert (held[total:] == PADDING[name.split()[0]]).all(), name
        for mapping in inputs.slot_mappings:
            assert (mapping[: room.decoding] == -1).all(), "no block gets a token of padding"
        hole = int(decoding > 0)
        rows = hole + len(lengths)
        assert torch.equal(inputs.slots[:rows], there.slots) and (inputs.slots[rows:] == -1).all()
        bounds, expected = inputs.cu_seqlens, there.cu_seqlens
        assert bounds is not None and expected is not None and bounds[0] == 0
        assert torch.equal(bounds[hole : rows + 1], expected[hole:] + shift)
        assert (bounds[rows + 1 :] == room.decoding + total).all()
        last, wanted = inputs.last_index, there.last_index
        assert last is not None and wanted is not None
        assert last[: room.decoding].tolist() == list(range(room.decoding))
        pieces = last[room.decoding : room.decoding + room.pieces]
        first_scored = decoding + len(lengths)
        assert torch.equal(pieces[: len(lengths)], wanted[decoding:first_scored] + shift)
        scored = last[room.decoding + room.pieces :]
        count = len(targets)
        assert torch.equal(scored[:count], wanted[first_scored:] + shift)
        assert (scored[count:] == 0).all() and (pieces[len(lengths) :] == 0).all()
        assert torch.equal(static.targets[:count], targets)
        assert torch.equal(static.ends[:decoding], ends[:decoding])
        assert (static.ends[decoding : room.decoding] == -1).all()
        behind = static.ends[room.decoding :]
        assert torch.equal(behind[: len(lengths)], ends[decoding:])
        assert (behind[len(lengths) :] == -1).all()
    assert pointers == [t.data_ptr() for t in tokens_of(static.inputs).values()], (
        "graphs read there"
    )


def test_what_graphs_read_begins_at_multiples_of_16_bytes() -> None:
    for tokens in (1, 3, 16, 50):
        for decoding in (0, 3):
            room = Room(tokens, 3, decoding, 5)
            static = StaticInputs(room, 2, CPU, has_spans=True, tokens_on_host=True)
            inputs = static.inputs
            first = static._words.data_ptr()
            tensors = [inputs.slots, inputs.cu_seqlens, inputs.last_index, static.ends]
            for tensor in [*tensors, static.targets, *tokens_of(inputs).values()]:
                assert tensor is not None and (tensor.data_ptr() - first) % 16 == 0
