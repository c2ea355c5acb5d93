import pytest
import torch

from torch_paged.ops.argmax import _launch_argmax, argmax, argmax_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Around one tile of 1024 (few rows) and of 4096 (more), several tiles, and one column.
SHAPES = [(1, 1), (1, 7), (2, 1023), (2, 1024), (3, 1025), (5, 4095), (5, 4096), (6, 4097)]
SHAPES += [(1, 5003), (7, 9001)]


def _logits(num_rows, vocab_size, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    # Rounded to few distinct values, so that nearly every row has ties at its maximum.
    values = (torch.randn(num_rows, vocab_size, generator=generator) * 4).round() / 2
    return values.to(dtype).to(DEVICE)


def _first_maximum(row):
    """The definition, in Python: the first NaN, otherwise the first index of the maximum."""
    values = row.double().tolist()
    for index, value in enumerate(values):
        if value != value:
            return index
    return values.index(max(values))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"B{s[0]}-V{s[1]}")
def test_first_index_of_the_maximum_is_returned(shape, dtype):
    logits = _logits(*shape, dtype)
    expected = [_first_maximum(row) for row in logits]
    assert _launch_argmax(logits).tolist() == expected
    assert argmax_reference(logits.cpu()).tolist() == expected


def test_first_nan_wins_over_every_number_in_any_tile():
    logits = _logits(3, 3000, torch.float32)
    logits[0, 2999] = float("nan")
    logits[1, [1500, 2100]] = float("nan")
    logits[1, 3] = float("inf")
    # A NaN with its sign bit set orders below every number when compared as an integer.
    logits[2, 17:19] = torch.tensor([-4194304], dtype=torch.int32).view(torch.float32).item()
    assert logits[2, 17].isnan()
    assert _launch_argmax(logits).tolist() == [2999, 1500, 17]
    assert argmax(logits).tolist() == [2999, 1500, 17]


def test_zeros_of_both_signs_tie():
    logits = torch.full((1, 2050), -1.0, device=DEVICE)
    logits[0, 5], logits[0, 6], logits[0, 2000] = -0.0, 0.0, 0.0
    assert _launch_argmax(logits).tolist() == [5]


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), -3.0e38], ids=str)
def test_constant_row_gives_index_zero(value):
    logits = torch.full((2, 1030), value, device=DEVICE)
    assert _launch_argmax(logits).tolist() == [0, 0]


def test_row_stride_is_free():
    wide = _logits(3, 2100, torch.bfloat16)
    wide[:, 2000:] = 1000.0
    view = wide[:, :2000]
    assert _launch_argmax(view).tolist() == _launch_argmax(view.contiguous()).tolist()
    assert max(_launch_argmax(view).tolist()) < 2000


def test_result_does_not_depend_on_the_batch():
    logits = _logits(6, 5000, torch.bfloat16)
    together = _launch_argmax(logits).tolist()  # tiles of 4096
    alone = [_launch_argmax(logits[i : i + 1]).item() for i in range(6)]  # tiles of 1024
    assert together == alone


def test_empty_batch_gives_no_tokens():
    tokens = _launch_argmax(torch.empty(0, 100, device=DEVICE))
    assert tokens.shape == (0,) and tokens.dtype == torch.int64


@pytest.mark.parametrize(
    ("logits", "error", "match"),
    [
        (torch.zeros(5), ValueError, r"\[num_rows, vocab_size\]"),
        (torch.zeros(2, 0), ValueError, "vocab_size > 0"),
        (torch.zeros(2, 5, dtype=torch.int32), TypeError, "float32"),
        (torch.zeros(5, 2).t(), ValueError, "contiguous"),
    ],
    ids=["1d", "no-vocab", "int", "transposed"],
)
def test_wrong_logits_are_rejected(logits, error, match):
    with pytest.raises(error, match=match):
        argmax(logits)


def test_op_passes_opcheck():
    op = torch.ops.torch_paged.argmax.default
    torch.library.opcheck(op, (_logits(3, 100, torch.float32).cpu(),))
    torch.library.opcheck(op, (torch.randn(4, 70, dtype=torch.bfloat16)[:, :65],))


def test_op_compiles_without_graph_breaks():
    logits = _logits(3, 300, torch.float32)
    compiled = torch.compile(lambda x: argmax(x) + 1, fullgraph=True, backend="eager")
    assert compiled(logits).tolist() == (argmax(logits) + 1).tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need CUDA")
def test_graph_replay_equals_eager():
    logits = _logits(3, 20000, torch.bfloat16)
    argmax(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = argmax(logits)
    for seed in (1, 2):
        logits.copy_(_logits(3, 20000, torch.bfloat16, seed))
        graph.replay()
        assert tokens.tolist() == [_first_maximum(row) for row in logits]
