"""The sampling kernels against the reference, which test_sample_reference.py holds to its word."""

import pytest
import torch

from torch_paged.ops.sample import sample, sample_reference
from torch_paged.ops.sample.launch import _launch_sample
from torch_paged.ops.sample.parts import exponentials
from torch_paged.ops.sample.reference import _support
from torch_paged.ops.sample.reference import exponentials as exponentials_reference
from torch_paged.ops.triton_compat import tl, triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF = float("inf")
# temperature, top_k, top_p, min_p
FILTERS = [
    (0.0, 5, 0.5, 0.1),
    (1.0, 0, 1.0, 0.0),
    (0.7, 1, 1.0, 0.0),
    (1.3, 20, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (2.0, 0, 0.3, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.8, 20, 0.95, 0.0),
    (3.0, 150, 0.8, 0.02),
    (1e-6, 0, 0.9, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 1000000, 1e-8, 1.0),
]


class Parameters:
    """Per-slot state for rows with the given (temperature, top_k, top_p, min_p)."""

    def __init__(self, filters, seeds=None, counters=None):
        temperature, top_k, top_p, min_p = zip(*filters, strict=True)
        num_slots = len(filters)
        self.slots = torch.arange(num_slots, dtype=torch.int32, device=DEVICE)
        self.state = [
            torch.tensor(temperature, dtype=torch.float64),
            torch.tensor(top_k, dtype=torch.int32),
            torch.tensor(top_p, dtype=torch.float64),
            torch.tensor(min_p, dtype=torch.float64),
            torch.arange(num_slots) * 7919 - 12345 if seeds is None else torch.tensor(seeds),
            torch.arange(num_slots).int() if counters is None else torch.tensor(counters).int(),
        ]
        self.state = [tensor.to(DEVICE) for tensor in self.state]

    def draw(self, op, logits):
        return op(logits, self.slots, *self.state)


def _logits(num_rows, vocab_size, dtype, seed=0, scale=2.0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=g) * scale).to(dtype).to(DEVICE)


def _assert_equal_to_reference(logits, parameters):
    expected = parameters.draw(sample_reference, logits)
    assert parameters.draw(_launch_sample, logits).tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_all_kinds_of_filters_equal_the_reference(dtype):
    _assert_equal_to_reference(_logits(len(FILTERS), 263, dtype), Parameters(FILTERS))


# One token, a group of 64 +-1, a tile of 2048 +-1.
@pytest.mark.parametrize("vocab_size", [1, 5, 63, 64, 65, 2047, 2048, 2049])
def test_sizes_around_groups_and_tiles_equal_the_reference(vocab_size):
    filters = [(1.0, 0, 1.0, 0.0), (1.0, 7, 0.7, 0.0), (1.5, 0, 0.9, 0.01)]
    logits = _logits(3, vocab_size, torch.bfloat16, seed=vocab_size)
    _assert_equal_to_reference(logits, Parameters(filters))


def test_filters_that_keep_many_groups_equal_the_reference():
    # 141 groups: more than are read at once, and more than a list is kept for when it shrinks.
    filters = [(1.0, 0, 0.9, 0.0), (5.0, 0, 0.5, 0.0), (1.0, 3000, 0.99, 0.0), (4.0, 0, 1.0, 0.3)]
    logits = _logits(4, 9001, torch.bfloat16, scale=1.0)
    _assert_equal_to_reference(logits, Parameters(filters))


def test_ties_beyond_a_small_top_k_equal_the_reference():
    # All tokens tie, so top-k keeps them all although k is small and no race was run early.
    logits = torch.full((3, 5000), 2.5, dtype=torch.bfloat16, device=DEVICE)
    logits[2, 4321] = 3.0
    filters = [(1.0, 50, 1.0, 0.0), (1.0, 50, 0.25, 0.0), (1.0, 50, 0.9, 0.0)]
    _assert_equal_to_reference(logits, Parameters(filters))


def _probes(row, filters, num_counters=4096):
    """Tokens at the edge of the row's support, each with a counter that shows if it is in it.

    With that counter the token wins the race among the support and itself.
    """
    temperature, top_k, top_p, min_p = filters
    scores = row.float().cpu() * (1.0 / torch.tensor(temperature))
    kept = _support(
        scores[None],
        torch.tensor([top_k]),
        torch.tensor([top_p], dtype=torch.float64),
        torch.tensor([min_p], dtype=torch.float64),
    )[0]
    # Ascending as top-p counts: by score, then by index.
    order = torch.sort(scores, stable=True).indices
    inside = [token for token in order.tolist() if kept[token]][:2]
    outside = [token for token in order.tolist() if not kept[token]][-2:]
    weights = (scores - scores.max()).exp()
    counters = torch.arange(num_counters)
    numbers = exponentials_reference(torch.full_like(counters, 77), counters, row.numel())
    race = weights / numbers
    for token in inside + outside:
        members = kept.clone()
        members[token] = True
        wins = race.masked_fill(~members, -1.0).argmax(dim=1) == token
        assert wins.any(), "no counter shows this token: raise num_counters"
        yield token, int(wins.nonzero()[0, 0]), bool(kept[token])


EDGES = [
    (1.0, 10, 1.0, 0.0),
    (1.0, 0, 0.6, 0.0),
    (1.5, 0, 0.95, 0.0),
    (1.0, 0, 1.0, 0.3),
    (1.2, 30, 0.8, 0.0),
    (1.0, 30, 0.9, 0.4),
]


@pytest.mark.parametrize("filters", EDGES, ids=str)
@pytest.mark.parametrize("rows", ["distinct", "ties"])
def test_the_support_ends_where_that_of_the_reference_ends(rows, filters):
    dtype = torch.float32 if rows == "distinct" else torch.bfloat16
    row = _logits(1, 150, dtype, seed=4, scale=1.0)[0]
    if rows == "ties":
        row = (row * 2).round() / 2
    tokens, counters, inside = zip(*_probes(row, filters), strict=True)
    parameters = Parameters([filters] * len(tokens), seeds=[77] * len(tokens), counters=counters)
    got = parameters.draw(_launch_sample, row.expand(len(tokens), -1).contiguous())
    assert [got[i].item() == tokens[i] for i in range(len(tokens))] == list(inside)
    assert sum(inside) in (1, 2)


@triton.jit
def _write_exponentials(out_ptr, seed_ptr, counter_ptr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    group = tl.arange(0, GROUPS)
    numbers = exponentials(tl.load(seed_ptr), tl.load(counter_ptr), group, GROUPS, GROUP)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(out_ptr + token, numbers)


@pytest.mark.parametrize("seed", [0, 1, -1, (1 << 62) + 12345, -(1 << 63)])
@pytest.mark.parametrize("counter", [0, 3, (1 << 35) + 1])
def test_random_numbers_equal_the_reference(seed, counter):
    out = torch.full((32, 64), float("nan"), device=DEVICE)
    seeds, counters = torch.tensor([seed]), torch.tensor([counter])
    _write_exponentials[(1,)](
        out, seeds.to(DEVICE), counters.to(DEVICE), 32, 64, enable_fp_fusion=False
    )
    expected = exponentials_reference(seeds, counters, 2048)[0]
    error = (out.flatten().cpu() - expected).abs()
    assert (error <= 4 * torch.finfo(torch.float32).eps * expected).all()


def test_result_depends_neither_on_the_batch_nor_on_the_place_in_it():
    logits = _logits(6, 263, torch.bfloat16)
    parameters = Parameters([FILTERS[i] for i in (1, 3, 4, 6, 7, 8)])
    together = parameters.draw(_launch_sample, logits)
    order = torch.tensor([4, 0, 5, 2], device=DEVICE)
    slots = parameters.slots[order]
    shuffled = _launch_sample(logits[order], slots, *parameters.state)
    assert torch.equal(shuffled, together[order])
    alone = _launch_sample(logits[3:4], parameters.slots[3:4], *parameters.state)
    assert alone.tolist() == together[3:4].tolist()


def test_padding_rows_give_zero_and_read_nothing():
    logits = _logits(3, 70, torch.float32)
    logits[1] = float("nan")
    parameters = Parameters([(1.0, 5, 0.9, 0.0)])
    slots = torch.tensor([0, -1, -1], dtype=torch.int32, device=DEVICE)
    for op in (_launch_sample, sample_reference):
        tokens = op(logits, slots, *parameters.state)
        assert tokens[1:].tolist() == [0, 0] and 0 <= tokens[0].item() < 70


def test_rows_without_a_distribution_are_greedy():
    logits = _logits(6, 130, torch.float32)
    logits[0, [100, 30]] = float("nan")
    logits[1, [90, 40]] = INF
    logits[2] = -INF
    logits[3] = 0.0
    logits[3, 77] = 3.0
    logits[4, 50] = 3.0e38
    parameters = Parameters(
        [(1.0, 0, 0.9, 0.0)] * 3 + [(1e-40, 3, 0.9, 0.1), (1e-3, 0, 1.0, 0.5), (-1.0, 5, 0.5, 0.0)]
    )
    for op in (_launch_sample, sample_reference):
        tokens = parameters.draw(op, logits).tolist()
        assert tokens == [30, 40, 0, 77, 50, logits[5].argmax().item()]


def test_suppressed_tokens_are_never_drawn():
    logits = _logits(3, 300, torch.float32, scale=0.1)
    logits[:, 10:] = -INF
    parameters = Parameters([(5.0, 0, 1.0, 0.0), (5.0, 250, 0.999, 0.0), (5.0, 0, 0.999, 0.0)])
    _assert_equal_to_reference(logits, parameters)
    assert parameters.draw(_launch_sample, logits).max() < 10


def test_mixed_batch_keeps_each_row_to_its_own_parameters():
    row = _logits(1, 263, torch.float32)
    parameters = Parameters(
        [(0.0, 0, 1.0, 0.0), (2.0, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.0, 0, 0.1, 0.0)]
    )
    logits = row.expand(4, -1).contiguous()
    greedy = row.argmax().item()
    tokens = parameters.draw(_launch_sample, logits).tolist()
    assert tokens[0] == tokens[2] == greedy
    assert tokens == parameters.draw(sample_reference, logits).tolist()


def test_row_stride_is_free_and_float32_parameters_are_taken():
    wide = _logits(3, 200, torch.bfloat16)
    wide[:, 150:] = 100.0
    parameters = Parameters([(1.0, 0, 0.9, 0.0), (1.0, 9, 1.0, 0.0), (2.0, 0, 1.0, 0.0)])
    parameters.state[0] = parameters.state[0].float()
    parameters.state[1] = parameters.state[1].long()
    parameters.state[2] = parameters.state[2].float()
    parameters.state[5] = parameters.state[5].long()
    view = wide[:, :150]
    expected = parameters.draw(_launch_sample, view.contiguous())
    assert torch.equal(parameters.draw(_launch_sample, view), expected)
    assert torch.equal(parameters.draw(sample_reference, view), expected)


def test_empty_batch_gives_no_tokens():
    parameters = Parameters([(1.0, 0, 1.0, 0.0)])
    tokens = _launch_sample(
        torch.empty(0, 9, device=DEVICE), parameters.slots[:0], *parameters.state
    )
    assert tokens.shape == (0,) and tokens.dtype == torch.int64


@pytest.mark.parametrize(
    ("position", "value", "match"),
    [
        (0, torch.ones(1, dtype=torch.int32), "temperature must be float32 or float64"),
        (1, torch.ones(1), "top_k must be int32 or int64"),
        (4, torch.ones(1, dtype=torch.int32), "seeds must be int64"),
        (5, torch.ones(2, dtype=torch.int32), r"counters must be int32 or int64 \[1\]"),
    ],
    ids=["temperature", "top_k", "seeds", "counters"],
)
def test_wrong_parameters_are_rejected(position, value, match):
    parameters = Parameters([(1.0, 0, 1.0, 0.0)])
    parameters.state[position] = value.to(DEVICE)
    with pytest.raises(TypeError, match=match):
        parameters.draw(sample, _logits(1, 9, torch.float32))


def test_op_passes_opcheck():
    parameters = Parameters([(1.0, 5, 0.9, 0.0), (0.0, 0, 1.0, 0.0)])
    arguments = (_logits(2, 40, torch.float32), parameters.slots, *parameters.state)
    op = torch.ops.torch_paged.sample.default
    torch.library.opcheck(op, tuple(tensor.cpu() for tensor in arguments))


def test_op_compiles_without_graph_breaks():
    parameters = Parameters([(1.0, 5, 0.9, 0.0), (2.0, 0, 1.0, 0.0)])
    logits = _logits(2, 40, torch.float32)
    compiled = torch.compile(sample, fullgraph=True, backend="eager")
    assert torch.equal(parameters.draw(compiled, logits), parameters.draw(sample, logits))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need CUDA")
def test_graph_replay_equals_eager():
    parameters = Parameters(FILTERS)
    logits = _logits(len(FILTERS), 20000, torch.bfloat16)
    parameters.draw(sample, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = parameters.draw(sample, logits)
    for seed in (1, 2):
        logits.copy_(_logits(len(FILTERS), 20000, torch.bfloat16, seed))
        parameters.state[5].add_(1)
        graph.replay()
        assert torch.equal(tokens, parameters.draw(sample, logits))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too slow when interpreted")
@pytest.mark.parametrize("vocab_size", [32000, 128256, 151936, 262144])
def test_large_vocabularies_equal_the_reference(vocab_size):
    filters = FILTERS + [(1.0, 50, 1.0, 0.0), (0.6, 20, 0.95, 0.0), (1.0, 0, 0.95, 0.0)]
    for dtype, scale in ((torch.bfloat16, 2.0), (torch.float32, 0.5)):
        logits = _logits(len(filters), vocab_size, dtype, scale=scale)
        _assert_equal_to_reference(logits, Parameters(filters))
