from dataclasses import dataclass, fields

import pytest
import torch

from torch_paged.ops.advance import _launch_advance, advance, advance_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class State:
    last_token: torch.Tensor
    positions: torch.Tensor
    context_lens: torch.Tensor
    num_generated: torch.Tensor
    max_new_tokens: torch.Tensor
    finished: torch.Tensor
    eos_ids: torch.Tensor
    pad_token: torch.Tensor
    output: torch.Tensor
    num_unfinished: torch.Tensor

    def arguments(self):
        return tuple(getattr(self, field.name) for field in fields(self))

    def to(self, device):
        return State(*(tensor.clone().to(device) for tensor in self.arguments()))


def _random_state(num_slots, num_eos, ring_size, seed):
    g = torch.Generator().manual_seed(seed)

    def ints(low, high, *shape, dtype=torch.int32):
        return torch.randint(low, high, shape, generator=g).to(dtype)

    limit = ints(1, 3 * ring_size, num_slots)
    eos = ints(0, 8, num_slots, num_eos, dtype=torch.int64)
    eos[torch.rand(num_slots, num_eos, generator=g) < 0.4] = -1
    return State(
        last_token=ints(0, 20, num_slots, dtype=torch.int64),
        positions=ints(0, 5000, num_slots),
        context_lens=ints(0, 5000, num_slots),
        # Just below, at and above the limit, and past one turn of the ring.
        num_generated=(limit + ints(-3, 2, num_slots)).clamp_(min=0),
        max_new_tokens=limit,
        finished=torch.rand(num_slots, generator=g) < 0.3,
        eos_ids=eos,
        pad_token=ints(-1, 3, num_slots, dtype=torch.int64),
        output=ints(-99, -1, ring_size, num_slots, dtype=torch.int64),
        num_unfinished=torch.tensor([-7], dtype=torch.int32),
    )


def _random_rows(num_rows, num_slots, seed):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 20, (num_rows,), generator=g)
    slots = torch.full((num_rows,), -1, dtype=torch.int32)
    # Distinct slots in random order, padding rows in between.
    num_live = min(num_slots, num_rows) * 3 // 4 + 1 if num_rows else 0
    num_live = min(num_live, num_slots, num_rows)
    places = torch.randperm(num_rows, generator=g)[:num_live]
    slots[places] = torch.randperm(num_slots, generator=g)[:num_live].to(torch.int32)
    return tokens, slots


def _advance_in_python(tokens, slots, state):
    """The contract row by row, on lists."""
    new = State(*(tensor.tolist() for tensor in state.arguments()))
    ring_size = len(new.output)
    unfinished = 0
    for token, s in zip(tokens.tolist(), slots.tolist(), strict=True):
        if s < 0:
            continue
        was = new.finished[s]
        t = new.pad_token[s] if was and new.pad_token[s] >= 0 else token
        new.output[new.num_generated[s] % ring_size][s] = t
        new.last_token[s] = t
        new.positions[s] += 1
        new.context_lens[s] += 1
        new.num_generated[s] += 1
        ends = [e for e in new.eos_ids[s] if e >= 0]
        new.finished[s] = was or t in ends or new.num_generated[s] >= new.max_new_tokens[s]
        unfinished += not new.finished[s]
    new.num_unfinished[0] = unfinished
    return new


def _assert_equal(state, expected):
    for field in fields(State):
        assert getattr(state, field.name).tolist() == getattr(expected, field.name), field.name


# (rows, slots, end tokens, ring): 1, odd, around the block of 32 rows, a full batch, no rows,
# no end tokens.
CASES = [
    (1, 1, 1, 4),
    (5, 9, 3, 1),
    (31, 40, 2, 5),
    (32, 32, 8, 7),
    (33, 30, 1, 64),
    (6, 6, 0, 3),
    (33, 40, 100, 3),
    (0, 3, 2, 4),
]


@pytest.mark.parametrize("advance_rows", [_launch_advance, advance_reference, advance])
@pytest.mark.parametrize("case", CASES, ids=lambda c: "B{}-S{}-E{}-R{}".format(*c))
def test_state_follows_the_contract(case, advance_rows):
    num_rows, num_slots, num_eos, ring_size = case
    for seed in range(4):
        state = _random_state(num_slots, num_eos, ring_size, seed).to(DEVICE)
        tokens, slots = _random_rows(num_rows, num_slots, seed)
        expected = _advance_in_python(tokens, slots, state)
        advance_rows(tokens.to(DEVICE), slots.to(DEVICE), *state.arguments())
        _assert_equal(state, expected)


@pytest.mark.parametrize("num_eos", [64, 65, 2000])
def test_any_of_many_end_tokens_ends_a_row(num_eos):
    state = _random_state(3, num_eos, 4, 0)
    state.finished.fill_(False)
    state.num_generated.zero_()
    state.max_new_tokens.fill_(9)
    state.eos_ids.copy_(torch.arange(100, 100 + num_eos).repeat(3, 1))
    state = state.to(DEVICE)
    slots = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([100, 99 + num_eos, 100 + num_eos], device=DEVICE)
    _launch_advance(tokens, slots, *state.arguments())
    assert state.finished.tolist() == [True, True, False]


def test_more_rows_than_one_block_are_all_counted():
    state = _random_state(1500, 2, 4, 0).to(DEVICE)
    tokens, slots = _random_rows(1027, 1500, 0)
    expected = _advance_in_python(tokens, slots, state)
    _launch_advance(tokens.to(DEVICE), slots.to(DEVICE), *state.arguments())
    _assert_equal(state, expected)


def test_successive_steps_end_rows_at_end_token_or_limit():
    state = _random_state(3, 1, 8, 0)
    state.finished.fill_(False)
    state.num_generated.zero_()
    state.max_new_tokens.copy_(torch.tensor([3, 9, 9]))
    state.eos_ids.copy_(torch.tensor([[-1], [5], [5]]))
    state.pad_token.copy_(torch.tensor([0, 0, -1]))
    state = state.to(DEVICE)
    slots = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
    counts = []
    for token in (4, 5, 6, 7):
        tokens = torch.full((3,), token, device=DEVICE)
        _launch_advance(tokens, slots, *state.arguments())
        counts.append(state.num_unfinished.item())
    assert counts == [3, 1, 0, 0]
    # Slot 0 pads after its limit, slot 1 after its end token; slot 2 has no pad token.
    assert state.output[:4].tolist() == [[4, 4, 4], [5, 5, 5], [6, 0, 6], [0, 0, 7]]


def test_padding_rows_change_nothing():
    state = _random_state(4, 2, 3, 0).to(DEVICE)
    before = state.to(DEVICE)
    slots = torch.full((6,), -1, dtype=torch.int32, device=DEVICE)
    _launch_advance(torch.arange(6, device=DEVICE), slots, *state.arguments())
    before.num_unfinished.zero_()
    for got, want in zip(state.arguments(), before.arguments(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("finished", torch.zeros(4, dtype=torch.int32), "finished must be contiguous torch.bool"),
        ("positions", torch.zeros(4, dtype=torch.int64), "positions must be"),
        ("num_generated", torch.zeros(5, dtype=torch.int32), "num_generated must be"),
        ("eos_ids", torch.zeros(2, 4, dtype=torch.int64).t()[:, :2], "eos_ids must be"),
        ("output", torch.zeros(3, 5, dtype=torch.int64), "output must be"),
        ("num_unfinished", torch.zeros(2, dtype=torch.int32), "num_unfinished must be"),
    ],
    ids=lambda v: v if isinstance(v, str) and " " not in v else "",
)
def test_wrong_state_is_rejected(name, value, match):
    state = _random_state(4, 2, 3, 0)
    setattr(state, name, value)
    tokens, slots = _random_rows(3, 4, 0)
    with pytest.raises(TypeError, match=match):
        advance(tokens, slots, *state.arguments())


def test_wrong_slots_are_rejected():
    state = _random_state(4, 2, 3, 0)
    with pytest.raises(TypeError, match="slots must be int32"):
        advance(torch.zeros(2, dtype=torch.int64), torch.arange(2), *state.arguments())


def test_op_passes_opcheck():
    state = _random_state(5, 2, 3, 0)
    tokens, slots = _random_rows(4, 5, 0)
    op = torch.ops.torch_paged.advance.default
    torch.library.opcheck(op, (tokens, slots, *state.arguments()))


def test_op_compiles_without_graph_breaks():
    state = _random_state(5, 2, 3, 0).to(DEVICE)
    tokens, slots = _random_rows(4, 5, 0)
    expected = _advance_in_python(tokens, slots, state)
    compiled = torch.compile(advance, fullgraph=True, backend="eager")
    compiled(tokens.to(DEVICE), slots.to(DEVICE), *state.arguments())
    _assert_equal(state, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need CUDA")
def test_graph_replay_equals_eager():
    state = _random_state(9, 2, 4, 0).to(DEVICE)
    tokens, slots = (tensor.to(DEVICE) for tensor in _random_rows(8, 9, 0))
    warm = state.to(DEVICE)
    advance(tokens, slots, *warm.arguments())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        advance(tokens, slots, *state.arguments())
    expected = state
    for _ in range(3):
        expected = _advance_in_python(tokens, slots, expected)
        graph.replay()
        _assert_equal(state, expected)
        expected = state.to("cpu")
