"""embed against torch's embedding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from torch_paged.ops.embed import _launch_embed, embed, embed_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOTH = pytest.mark.parametrize("launch", [_launch_embed, embed_reference])
VOCAB = 37


def _weight(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    # A view into poisoned rows: the row stride is free.
    wide = torch.full((VOCAB, width + 5), float("nan"), dtype=dtype)
    wide[:, :width] = torch.randn(VOCAB, width, generator=generator)
    return wide.to(DEVICE)[:, :width]


def _int(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    """torch.empty returns NaN, so that an element left unwritten shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@BOTH
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 80, 1023, 1024, 1025])
def test_rows_are_copied_exactly(width, dtype, ids_dtype, launch):
    weight = _weight(width, dtype)
    ids = _int(0, VOCAB - 1, 5, 5, 11, dtype=ids_dtype)
    torch.testing.assert_close(launch(ids, None, weight), F.embedding(ids, weight), rtol=0, atol=0)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_are_read_through_slots(dtype, launch):
    weight = _weight(80, dtype)
    last_token = _int(3, 1, 4, 15, 9)
    slots = _int(4, 0, 2, 4, dtype=torch.int32)
    expected = F.embedding(_int(9, 3, 4, 9), weight)
    torch.testing.assert_close(launch(last_token, slots, weight), expected, rtol=0, atol=0)


@BOTH
def test_padding_rows_are_zero_and_read_nothing(launch):
    weight = _weight(80)
    # A token outside the table in slot 0 must not be read by the padding rows.
    last_token = _int(10**12, 7)
    slots = _int(-1, 1, -1, dtype=torch.int32)
    got = launch(last_token, slots, weight)
    torch.testing.assert_close(got[1], weight[7], rtol=0, atol=0)
    torch.testing.assert_close(got[::2], torch.zeros(2, 80, device=DEVICE), rtol=0, atol=0)


@BOTH
@pytest.mark.parametrize("scale", [0.5, 27.712812921102035, 12.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_rounds_once_as_torch_scales_by_a_number(dtype, scale, launch):
    weight = _weight(80, dtype)
    ids = torch.arange(VOCAB, device=DEVICE)
    expected = F.embedding(ids, weight) * scale
    torch.testing.assert_close(launch(ids, None, weight, scale), expected, rtol=0, atol=0)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemma_scale_rounded_by_the_caller_gives_hugging_face_values(dtype, launch):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    module = Gemma3TextScaledWordEmbedding(VOCAB, 80, 0, embed_scale=80**0.5).to(DEVICE, dtype)
    ids = torch.arange(VOCAB, device=DEVICE)
    scale = torch.tensor(80**0.5).to(dtype).item()
    got = launch(ids, None, module.weight.detach(), scale)
    torch.testing.assert_close(got, module(ids).detach(), rtol=0, atol=0)


def test_id_outside_the_table_gives_nan_in_the_kernel():
    weight = _weight(80)
    got = _launch_embed(_int(0, VOCAB, -1, 2**40), None, weight)
    torch.testing.assert_close(got[0], weight[0], rtol=0, atol=0)
    assert bool(got[1:].isnan().all())


@pytest.mark.parametrize("bad", [VOCAB, -1])
def test_id_outside_the_table_raises_on_cpu(bad):
    with pytest.raises(IndexError):
        embed_reference(torch.tensor([bad]), None, _weight(8).cpu())


@BOTH
def test_empty_batch(launch):
    weight = _weight(80)
    assert launch(_int(), None, weight).shape == (0, 80)
    assert launch(_int(1), _int(dtype=torch.int32), weight).shape == (0, 80)


def test_table_past_two_gibi_elements():
    # Pages of the table that nobody touches are never allocated.
    torch.use_deterministic_algorithms(False)
    weight = torch.empty(2**21 + 2, 1024, dtype=torch.float16, device=DEVICE)
    weight[2**21 + 1] = torch.arange(1024)
    got = _launch_embed(_int(2**21 + 1), None, weight)
    torch.testing.assert_close(got[0], weight[2**21 + 1], rtol=0, atol=0)


@pytest.mark.parametrize("slots", [None, _int(1, -1, 0, dtype=torch.int32)], ids=["ids", "slots"])
def test_opcheck(slots):
    args = (_int(3, 1, 4), slots, _weight(80), 2.0)
    torch.library.opcheck(torch.ops.torch_paged.embed.default, args)


def test_compiles_without_graph_breaks():
    compiled = torch.compile(embed, fullgraph=True, backend="eager")
    args = (_int(3, 1, 4), _int(1, -1, 0, dtype=torch.int32), _weight(80))
    torch.testing.assert_close(compiled(*args), embed(*args), rtol=0, atol=0)


@pytest.mark.skipif(DEVICE == "cpu", reason="captures a CUDA graph")
def test_replay_reads_the_new_tokens():
    last_token, slots, weight = _int(3, 1, 4), _int(2, -1, dtype=torch.int32), _weight(4096)
    embed(last_token, slots, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = embed(last_token, slots, weight)
    last_token.copy_(_int(7, 8, 9))
    slots.copy_(_int(0, 1, dtype=torch.int32))
    graph.replay()
    torch.testing.assert_close(captured, F.embedding(_int(7, 8), weight), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("ids", "slots", "weight", "error"),
    [
        (torch.ones(2, 2).long(), None, torch.ones(4, 8), "ids must be contiguous int64"),
        (torch.ones(2), None, torch.ones(4, 8), "ids must be contiguous int64"),
        (torch.ones(4).long()[::2], None, torch.ones(4, 8), "ids must be contiguous int64"),
        (torch.ones(2).long(), torch.ones(2).long(), torch.ones(4, 8), r"slots .*\.int\(\)"),
        (torch.ones(2).long(), None, torch.ones(4, 8).t(), "weight must be floating"),
    ],
    ids=["2-d", "floating", "strided", "slots", "columns"],
)
def test_wrong_arguments_are_named(ids, slots, weight, error):
    with pytest.raises(ValueError, match=error):
        embed(ids, slots, weight)
