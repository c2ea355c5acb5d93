import pytest
import torch

from torch_paged.ops.token_logprobs import _launch_token_logprobs, token_logprobs_reference
from torch_paged.ops.top_logprobs import (
    MAX_TOP_LOGPROBS,
    _launch_top_logprobs,
    top_logprobs,
    top_logprobs_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One column, fewer columns than asked for, the tile of 4096 +-1, several tiles.
SHAPES = [(1, 1), (3, 7), (2, 1000), (2, 4095), (1, 4096), (3, 4097), (2, 12301)]
NO_TOKEN = (-1, float("-inf"))


def _logits(num_rows, vocab_size, dtype, seed=0, scale=5.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=g) * scale).to(dtype).to(DEVICE)


def _oracle(logits, count):
    """Ids and fp64 log-probabilities by a stable sort, without those of probability 0."""
    logprobs = torch.log_softmax(logits.double().cpu(), dim=-1)
    order = torch.sort(logits.double().cpu(), dim=-1, descending=True, stable=True).indices
    rows = []
    for row, ids in zip(logprobs, order, strict=True):
        found = [(i, row[i].item()) for i in ids[:count].tolist() if row[i] > -torch.inf]
        rows.append(found + [NO_TOKEN] * (count - len(found)))
    return rows


def _check(got, logits, count):
    ids, values = got
    assert ids.dtype == torch.int32 and values.dtype == torch.float32
    assert ids.shape == values.shape == (logits.shape[0], count)
    expected = _oracle(logits, count)
    assert ids.tolist() == [[i for i, _ in row] for row in expected]
    wanted = torch.tensor([[v for _, v in row] for row in expected]).double()
    reference = top_logprobs_reference(logits.cpu(), count)[1].double()
    real = wanted > -torch.inf
    # 2 x (error of the fp32 reference + one rounding of the largest quantity involved)
    largest = logits[logits > -torch.inf].double().abs().max().clamp(min=1.0).cpu()
    rounding = torch.maximum(wanted.abs(), largest) * torch.finfo(torch.float32).eps
    error = (values.cpu().double() - wanted).abs()
    budget = 2 * ((reference - wanted).abs() + rounding)
    assert (error[real] <= budget[real]).all()
    assert (values.cpu()[~real] == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"B{s[0]}-V{s[1]}")
@pytest.mark.parametrize("launch", [_launch_top_logprobs, top_logprobs_reference])
def test_finds_the_likeliest_tokens_in_order(shape, dtype, launch):
    logits = _logits(*shape, dtype)
    for count in (1, 5, 20) if shape[1] < 5000 else (5,):
        _check(launch(logits, count), logits, count)


@pytest.mark.parametrize("launch", [_launch_top_logprobs, top_logprobs_reference])
def test_equal_logits_come_by_index_across_tiles(launch):
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[0, [8999, 4096, 17, 4095]] = 3.0
    logits[1, 5::2] = -0.0
    ids, _ = launch(logits, 6)
    assert ids.tolist() == [[17, 4095, 4096, 8999, 0, 1], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("launch", [_launch_top_logprobs, top_logprobs_reference])
def test_tokens_without_probability_are_left_out(launch):
    logits = torch.full((2, 9000), float("-inf"), device=DEVICE)
    logits[0, [8500, 3, 8999]] = torch.tensor([1.0, 2.0, 1.0], device=DEVICE)
    logits[1, 44] = -7.0
    got = launch(logits, 5)
    _check(got, logits, 5)
    assert got[0].tolist() == [[3, 8500, 8999, -1, -1], [44, -1, -1, -1, -1]]
    assert got[1][1, 0].item() == 0.0


def test_huge_logits_do_not_overflow():
    logits = torch.full((1, 5000), -3.0e38, device=DEVICE)
    logits[:, 4500] = 3.0e38
    ids, values = _launch_top_logprobs(logits, 2)
    assert ids.tolist() == [[4500, 0]] and values.tolist() == [[0.0, float("-inf")]]


def test_nan_reaches_only_its_own_row():
    logits = _logits(3, 5000, torch.float32)
    clean = _launch_top_logprobs(logits, 4)
    logits[1, 4999] = float("nan")
    ids, values = _launch_top_logprobs(logits, 4)
    assert values[1].isnan().all() and ids[1, 0] == 4999
    assert torch.equal(ids[[0, 2]], clean[0][[0, 2]])
    assert torch.equal(values[[0, 2]], clean[1][[0, 2]])


def test_row_result_depends_neither_on_the_batch_nor_on_the_count():
    logits = _logits(5, 9000, torch.bfloat16)
    together = _launch_top_logprobs(logits, 7)
    for i in range(5):
        ids, values = _launch_top_logprobs(logits[i : i + 1], 3)
        assert torch.equal(ids, together[0][i : i + 1, :3])
        assert torch.equal(values, together[1][i : i + 1, :3])


@pytest.mark.parametrize(
    ("top", "token"),
    [
        (_launch_top_logprobs, _launch_token_logprobs),
        (top_logprobs_reference, token_logprobs_reference),
    ],
)
def test_numbers_are_those_of_token_logprobs(top, token):
    logits = _logits(3, 9000, torch.bfloat16)
    ids, values = top(logits, 3)
    for place in range(3):
        expected = token(logits, ids[:, place].long())
        torch.testing.assert_close(values[:, place], expected, atol=1e-6, rtol=1e-6)


def test_row_stride_is_free():
    view = _logits(2, 600, torch.bfloat16)[:, :500]
    for got, expected in zip(
        _launch_top_logprobs(view, 5), _launch_top_logprobs(view.contiguous(), 5), strict=True
    ):
        assert torch.equal(got, expected)


def test_empty_batch_gives_nothing():
    ids, values = _launch_top_logprobs(torch.empty(0, 9, device=DEVICE), 3)
    assert ids.shape == values.shape == (0, 3)


@pytest.mark.parametrize("count", [0, -1, MAX_TOP_LOGPROBS + 1])
def test_counts_out_of_range_are_rejected(count):
    with pytest.raises(ValueError, match="count must be 1 to 20"):
        top_logprobs(torch.zeros(2, 5), count)


def test_op_passes_opcheck():
    logits = _logits(3, 50, torch.float32).cpu()
    torch.library.opcheck(torch.ops.torch_paged.top_logprobs.default, (logits, 5))


def test_op_compiles_without_graph_breaks():
    logits = _logits(3, 50, torch.float32)
    compiled = torch.compile(top_logprobs, fullgraph=True, backend="eager")
    for got, expected in zip(compiled(logits, 5), top_logprobs(logits, 5), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need CUDA")
def test_graph_replay_equals_eager():
    logits = _logits(3, 20000, torch.bfloat16)
    top_logprobs(logits, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = top_logprobs(logits, 5)
    for seed in (1, 2):
        logits.copy_(_logits(3, 20000, torch.bfloat16, seed))
        graph.replay()
        for replayed, expected in zip(got, top_logprobs(logits, 5), strict=True):
            assert torch.equal(replayed, expected)
