"""The scores that tokens are drawn from: those of the support, -inf elsewhere."""

import sys
from pathlib import Path

import pytest
import torch

from torch_paged.ops.sample import (
    sample_reference,
    sample_with_scores,
    sample_with_scores_reference,
)
from torch_paged.ops.sample.launch import _launch_sample_with_scores
from torch_paged.ops.sample.reference import _support

sys.path.append(str(Path(__file__).parent))

from test_sample import DEVICE, DTYPES, EDGES, FILTERS, INF, Parameters, _logits  # noqa: E402


def _check(logits, parameters):
    """Hold kernel and CPU kernel to the filters that `sample_reference` draws behind."""
    expected_tokens = parameters.draw(sample_reference, logits)
    temperature, top_k, top_p, min_p = (tensor[: len(logits)] for tensor in parameters.state[:4])
    scale = (1.0 / temperature.float())[:, None]
    drawn = (temperature > 0)[:, None] & ((logits.float().amax(1, True) * scale).abs() < INF)
    scaled = logits.float() * torch.where(drawn, scale, 1.0)
    keep = _support(torch.where(drawn, scaled, 0.0), top_k, top_p, min_p)
    expected = torch.where(drawn & ~keep, -INF, scaled)
    for op in (_launch_sample_with_scores, sample_with_scores_reference):
        tokens, scores = parameters.draw(op, logits)
        assert torch.equal(tokens, expected_tokens)
        assert scores.dtype == torch.float32 and scores.is_contiguous()
        torch.testing.assert_close(scores, expected, atol=0, rtol=0, equal_nan=True)
        assert (scores.gather(1, tokens[:, None]) > -INF).logical_or(~drawn).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_kinds_of_filters(dtype):
    _check(_logits(len(FILTERS), 263, dtype), Parameters(FILTERS))


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 2047, 2048, 2049])
def test_sizes_around_groups_and_tiles(vocab_size):
    filters = [(1.0, 0, 1.0, 0.0), (1.0, 7, 0.7, 0.0), (1.5, 0, 0.9, 0.01)]
    _check(_logits(3, vocab_size, torch.bfloat16, seed=vocab_size), Parameters(filters))


@pytest.mark.parametrize("rows", ["distinct", "ties"])
def test_edges_of_the_support(rows):
    dtype = torch.float32 if rows == "distinct" else torch.bfloat16
    row = _logits(1, 150, dtype, seed=4, scale=1.0)
    if rows == "ties":
        row = (row * 2).round() / 2
    _check(row.expand(len(EDGES), -1).contiguous(), Parameters(EDGES))


def test_rows_without_a_distribution_keep_their_logits():
    logits = _logits(5, 130, torch.float32)
    logits[0, [100, 30]] = float("nan")
    logits[1, [90, 40]] = INF
    logits[2] = -INF
    parameters = Parameters([(1.0, 0, 0.9, 0.0)] * 3 + [(1e-40, 3, 0.9, 0.1), (-1.0, 5, 0.5, 0.0)])
    for op in (_launch_sample_with_scores, sample_with_scores_reference):
        _, scores = parameters.draw(op, logits)
        torch.testing.assert_close(scores, logits, atol=0, rtol=0, equal_nan=True)


def test_suppressed_tokens_stay_out():
    logits = _logits(2, 300, torch.float32)
    logits[:, 40:] = -INF
    _check(logits, Parameters([(1.0, 0, 1.0, 0.0), (0.7, 30, 0.9, 0.05)]))


def test_padding_rows_read_nothing_and_row_stride_is_free():
    wide = _logits(4, 200, torch.bfloat16)
    view = wide[:, :150]
    parameters = Parameters([(1.0, 9, 1.0, 0.0), (2.0, 0, 0.5, 0.0)])
    parameters.slots = torch.tensor([1, -1, 0, -1], dtype=torch.int32, device=DEVICE)
    tokens, scores = parameters.draw(_launch_sample_with_scores, view)
    expected = parameters.draw(sample_with_scores_reference, view.contiguous())
    assert torch.equal(tokens, expected[0]) and tokens[[1, 3]].tolist() == [0, 0]
    assert torch.equal(scores, expected[1])
    assert torch.equal(scores[[1, 3]], view[[1, 3]].float())


def test_empty_batch_gives_nothing():
    parameters = Parameters([(1.0, 0, 1.0, 0.0)])
    parameters.slots = parameters.slots[:0]
    tokens, scores = parameters.draw(_launch_sample_with_scores, torch.empty(0, 9, device=DEVICE))
    assert tokens.shape == (0,) and scores.shape == (0, 9)


def test_wrong_parameters_are_rejected():
    parameters = Parameters([(1.0, 0, 1.0, 0.0)])
    parameters.state[1] = parameters.state[1].float()
    with pytest.raises(TypeError, match="top_k must be int32 or int64"):
        parameters.draw(sample_with_scores, _logits(1, 9, torch.float32))


def test_op_passes_opcheck():
    parameters = Parameters([(1.0, 5, 0.9, 0.0), (0.0, 0, 1.0, 0.0)])
    arguments = (_logits(2, 40, torch.float32), parameters.slots, *parameters.state)
    op = torch.ops.torch_paged.sample_with_scores.default
    torch.library.opcheck(op, tuple(tensor.cpu() for tensor in arguments))


def test_op_compiles_without_graph_breaks():
    parameters = Parameters([(1.0, 5, 0.9, 0.0), (2.0, 0, 1.0, 0.0)])
    logits = _logits(2, 40, torch.float32)
    compiled = torch.compile(sample_with_scores, fullgraph=True, backend="eager")
    got, expected = (parameters.draw(op, logits) for op in (compiled, sample_with_scores))
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need CUDA")
def test_graph_replay_equals_eager():
    parameters = Parameters(FILTERS)
    logits = _logits(len(FILTERS), 20000, torch.bfloat16)
    parameters.draw(sample_with_scores, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = parameters.draw(sample_with_scores, logits)
    for seed in (1, 2):
        logits.copy_(_logits(len(FILTERS), 20000, torch.bfloat16, seed))
        graph.replay()
        for got, expected in zip(
            captured, parameters.draw(sample_with_scores, logits), strict=True
        ):
            assert torch.equal(got, expected)
