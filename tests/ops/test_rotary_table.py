"""rotary_table against Hugging Face's rotary embedding modules."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from torch_paged.ops.rotary_table import (
    _launch_rotary_table,
    rotary_table,
    rotary_table_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize("launch", [_launch_rotary_table, rotary_table_reference])
POSITIONS = [0, 1, 2, 17, 255, 4095, 32768, 131071, 1000003]
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
}


def _int(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def _inv_freq(num_freqs: int) -> torch.Tensor:
    exponents = torch.arange(num_freqs, device=DEVICE, dtype=torch.float32) / num_freqs
    return 1.0 / 10000.0**exponents


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    """torch.empty returns NaN, so that an element left unwritten shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("head_dim", [16, 40, 80, 128])
@pytest.mark.parametrize("rope", ROPES)
def test_reference_equals_hugging_face_to_the_bit(rope, head_dim):
    config = LlamaConfig(
        head_dim=head_dim, rope_parameters=dict(ROPES[rope]), max_position_embeddings=8192
    )
    module = LlamaRotaryEmbedding(config)
    positions = torch.tensor(POSITIONS)
    cos, sin = module(torch.zeros(1), positions[None])
    got = rotary_table_reference(positions, None, module.inv_freq, module.attention_scaling)
    half = head_dim // 2
    torch.testing.assert_close(got, (cos[0, :, :half], sin[0, :, half:]), rtol=0, atol=0)


@pytest.mark.parametrize("scaling", [1.0, 1.3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_freqs", [1, 3, 20, 32, 33, 64, 128])
def test_kernel_is_exact_at_far_positions(num_freqs, dtype, scaling):
    positions, inv_freq = _int(*POSITIONS, dtype=dtype), _inv_freq(num_freqs)
    # The angle is rounded to fp32 by definition; its cos and sin are exact to the last bits.
    angle = (positions.float()[:, None] * inv_freq).double()
    exact = angle.cos() * scaling, angle.sin() * scaling
    got = _launch_rotary_table(positions, None, inv_freq, scaling)
    for table, expected in zip(got, exact, strict=True):
        assert table.dtype == torch.float32 and table.shape == (len(POSITIONS), num_freqs)
        assert (table.double() - expected).abs().max() <= 4 * torch.finfo(torch.float32).eps


@BOTH
def test_positions_are_read_through_slots_and_padding_is_zero(launch):
    inv_freq = _inv_freq(24)
    state = _int(100, 7, 4096)
    got = launch(state, _int(2, -1, 0, 2), inv_freq, 1.25)
    expected = rotary_table_reference(_int(4096, 0, 100, 4096), None, inv_freq, 1.25)
    for table, rows in zip(got, expected, strict=True):
        rows[1] = 0.0
        torch.testing.assert_close(table, rows, rtol=0, atol=4e-7)


@BOTH
def test_empty_batch(launch):
    for args in ((_int(), None), (_int(1), _int())):
        cos, sin = launch(*args, _inv_freq(8), 1.0)
        assert cos.shape == sin.shape == (0, 8)


@pytest.mark.parametrize("slots", [None, _int(1, -1, 0)], ids=["positions", "slots"])
def test_opcheck(slots):
    args = (_int(3, 1, 4), slots, _inv_freq(8), 1.5)
    torch.library.opcheck(torch.ops.torch_paged.rotary_table.default, args)


def test_compiles_without_graph_breaks():
    compiled = torch.compile(rotary_table, fullgraph=True, backend="eager")
    args = (_int(3, 1, 4), _int(1, -1, 0), _inv_freq(8))
    torch.testing.assert_close(
        compiled(*args, scaling=1.5), rotary_table(*args, scaling=1.5), rtol=0, atol=0
    )


@pytest.mark.skipif(DEVICE == "cpu", reason="captures a CUDA graph")
def test_replay_reads_the_new_positions():
    state, slots, inv_freq = _int(3, 1, 4), _int(2, -1), _inv_freq(64)
    rotary_table(state, slots, inv_freq)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rotary_table(state, slots, inv_freq)
    state.add_(1000)
    graph.replay()
    torch.testing.assert_close(captured, rotary_table(state, slots, inv_freq), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("positions", "slots", "inv_freq", "error"),
    [
        (torch.ones(2), None, torch.ones(4), "positions must be contiguous int32 or int64"),
        (torch.ones(1, 2).int(), None, torch.ones(4), "positions must be contiguous"),
        (torch.ones(2).int(), torch.ones(2), torch.ones(4), r"slots must be .*\.int\(\)"),
        (torch.ones(2).int(), None, torch.ones(4).half(), "inv_freq must be contiguous float32"),
    ],
    ids=["floating", "2-d", "slots", "half-frequencies"],
)
def test_wrong_arguments_are_named(positions, slots, inv_freq, error):
    with pytest.raises(ValueError, match=error):
        rotary_table(positions, slots, inv_freq)
