"""rotary_by_span against Hugging Face's rotary embedding modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from torch_paged.ops.rotary_by_span import (
    _launch_rotary_by_span,
    rotary_by_span,
    rotary_by_span_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = 64
DIM = 24
BOTH = pytest.mark.parametrize("launch", [_launch_rotary_by_span, rotary_by_span_reference])
ROPES = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(DIM // 2)],
        "long_factor": [2.0 + 0.7 * i for i in range(DIM // 2)],
        "original_max_position_embeddings": LIMIT,
        "factor": 8.0,
    },
}


def _int(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def module(kind: str) -> LlamaRotaryEmbedding:
    limit = LIMIT if kind == "dynamic" else 8 * LIMIT
    config = LlamaConfig(
        head_dim=DIM, rope_parameters=dict(ROPES[kind]), max_position_embeddings=limit
    )
    return LlamaRotaryEmbedding(config)


def from_hugging_face(kind: str, positions: list[int], span: int) -> tuple[Tensor, Tensor]:
    """What a fresh module gives for positions of a batch whose longest row has `span` tokens."""
    wide = torch.tensor([[*positions, span - 1]])
    cos, sin = module(kind)(torch.zeros(1), wide)
    return cos[0, :-1, : DIM // 2].to(DEVICE), sin[0, :-1, : DIM // 2].to(DEVICE)


def arguments(kind: str) -> dict[str, object]:
    """Return the frequencies of a fresh module and the rest of what the op takes."""
    fresh = module(kind)
    more = {"limit": LIMIT, "base": 10000.0, "factor": 4.0, "scaling": fresh.attention_scaling}
    long = None
    if kind == "longrope":
        fresh(torch.zeros(1), torch.tensor([[LIMIT]]))
        long = fresh.inv_freq.clone().to(DEVICE)
    inv_freq = fresh.original_inv_freq.clone().to(DEVICE)
    return {"inv_freq": inv_freq, "long_inv_freq": long, **more}


def close(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        # An angle of some hundreds of turns, in float32.
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5 if DEVICE == "cpu" else 5e-4)


@pytest.mark.parametrize("span", [LIMIT - 1, LIMIT, LIMIT + 1, 150, 400])
@pytest.mark.parametrize("kind", ROPES)
@BOTH
def test_a_batch_takes_the_span_of_its_longest_row(launch, kind, span):
    positions = [0, 1, span // 2, span - 1]
    leads = _int(*(span - 1 - p for p in positions))
    named = arguments(kind)
    got = launch(_int(*positions), None, leads, _int(0, 0, 0, 0), **named)
    close(got, from_hugging_face(kind, positions, span))
    floors = _int(*[span] * 4)
    assert all(map(torch.equal, launch(_int(*positions), None, None, floors, **named), got))


@pytest.mark.parametrize("kind", ROPES)
@BOTH
def test_rows_have_spans_of_their_own(launch, kind):
    """Slots out of order, one padding row; positions, leads and floors come from the state."""
    named = arguments(kind)
    positions = _int(7, 100, 63, 64, dtype=torch.int64)
    leads, floors = _int(0, 0, 5, 0), _int(90, 0, 0, 0)
    cos, sin = launch(positions, _int(3, -1, 0, 2, 1), leads, floors, **named)
    assert not cos[1].any() and not sin[1].any()
    for row, position, span in ((0, 64, 65), (2, 7, 90), (3, 63, 69), (4, 100, 101)):
        want = from_hugging_face(kind, [position], span)
        close((cos[row : row + 1], sin[row : row + 1]), want)


@pytest.mark.parametrize("kind", ROPES)
def test_short_spans_equal_hugging_face_to_the_bit(kind):
    cos, sin = rotary_by_span(_int(0, 5, 30), None, None, _int(64, 64, 64), **arguments(kind))
    if DEVICE == "cpu":
        want = from_hugging_face(kind, [0, 5, 30], LIMIT)
        assert torch.equal(cos, want[0]) and torch.equal(sin, want[1])


@BOTH
def test_no_rows_give_empty_tables(launch):
    cos, sin = launch(_int(), None, None, _int(), **arguments("dynamic"))
    assert cos.shape == sin.shape == (0, DIM // 2)


def test_opcheck():
    op = torch.ops.torch_paged.rotary_by_span.default
    state = torch.arange(6, dtype=torch.int32)
    freqs = torch.rand(8)
    rows = torch.tensor([2, -1, 0], dtype=torch.int32)
    torch.library.opcheck(op, (state, rows, state, state, freqs, freqs, 4, 1.0, 1.0, 1.5))
    torch.library.opcheck(op, (state, None, None, state, freqs, None, 4, 1e4, 2.0, 1.0))


def test_compiles_without_graph_breaks():
    named = arguments("dynamic")

    def tables(positions: Tensor, floors: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_by_span(positions, None, None, floors, **named)

    compiled = torch.compile(tables, fullgraph=True, backend="eager")
    args = (_int(1, 2, 80), _int(0, 0, 90))
    assert all(map(torch.equal, compiled(*args), tables(*args)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"floors": _int(0, 0)}, "floors must be"),
        ({"leads": _int(0, 0, 0, dtype=torch.int64)}, "leads must be"),
        ({"positions": _int(0, 0, 0).float()}, "positions must be"),
        ({"slots": _int(0, dtype=torch.int64)}, "slots must be"),
        ({"inv_freq": torch.rand(4).double()}, "inv_freq must be"),
        ({"long_inv_freq": torch.rand(3)}, "long_inv_freq must be"),
        ({"limit": 0}, "limit must be"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    good = {
        "positions": _int(1, 2, 3),
        "slots": None,
        "leads": None,
        "floors": _int(0, 0, 0),
        **arguments("dynamic"),
    }
    with pytest.raises(ValueError, match=message):
        rotary_by_span(**{**good, **change})


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("kind", ROPES)
def test_replay_follows_the_state(kind):
    """Captured short of the limit, replayed past it."""
    named = arguments(kind)
    positions, leads, floors = _int(5, 50, 60), _int(0, 0, 0), _int(0, 0, 0)
    slots = _int(2, 0, 1, -1)
    rotary_by_span(positions, slots, leads, floors, **named)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rotary_by_span(positions, slots, leads, floors, **named)
    for _ in range(3):
        positions += 30
        leads += 2
        graph.replay()
        want = rotary_by_span(positions, slots, leads, floors, **named)
        assert all(map(torch.equal, out, want))
