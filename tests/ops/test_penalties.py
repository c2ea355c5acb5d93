import pytest
import torch

from torch_paged.ops.penalties import (
    _launch_apply_repetition_penalty,
    _launch_apply_suppress_mask,
    _launch_mark_seen,
    apply_repetition_penalty,
    apply_repetition_penalty_reference,
    apply_suppress_mask,
    apply_suppress_mask_reference,
    mark_seen,
    mark_seen_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One token, a word +-1, odd, the tile of 4096 tokens +-1.
VOCABS = [1, 31, 32, 33, 263, 4095, 4096, 4097]
MARK = [
    pytest.param(_launch_mark_seen, id="kernel"),
    pytest.param(mark_seen_reference, id="reference"),
    pytest.param(mark_seen, id="op"),
]


def _num_words(vocab_size):
    return -(-vocab_size // 32)


def _bitmap(sets, vocab_size):
    """Bitmap of Python sets, built bit by bit."""
    words = [[0] * _num_words(vocab_size) for _ in sets]
    for s, members in enumerate(sets):
        for token in members:
            words[s][token // 32] |= 1 << (token % 32)
    signed = [[w - (1 << 32) if w >= 1 << 31 else w for w in row] for row in words]
    return torch.tensor(signed, dtype=torch.int32, device=DEVICE)


def _members(mask, s):
    words = [w % (1 << 32) for w in mask[s].tolist()]
    return {32 * i + bit for i, w in enumerate(words) for bit in range(32) if w >> bit & 1}


def _random_sets(num_slots, vocab_size, seed):
    g = torch.Generator().manual_seed(seed)
    size = max(1, min(40, vocab_size // 2))
    return [
        set(torch.randint(0, vocab_size, (size,), generator=g).tolist()) for _ in range(num_slots)
    ]


def _logits(num_rows, vocab_size, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_rows, vocab_size, generator=g) * 3).to(dtype)
    if vocab_size > 4:
        logits[0, :4] = torch.tensor([0.0, -0.0, float("inf"), float("-inf")])
    return logits.to(DEVICE)


def _slots(*slots):
    return torch.tensor(slots, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("mark", MARK)
def test_marked_tokens_are_added_to_their_slots(mark):
    vocab_size = 1000
    sets = _random_sets(4, vocab_size, 0)
    mask = _bitmap(sets, vocab_size)
    g = torch.Generator().manual_seed(1)
    # More than one block of tokens; many repeats, and many in one word of one slot.
    tokens = torch.randint(0, vocab_size, (300,), generator=g)
    tokens[:64] = torch.arange(64) % 32 + 64
    tokens[64:70] = 31
    slots = torch.randint(-1, 4, (300,), generator=g, dtype=torch.int32)
    slots[:70] = 2
    for s, t in zip(slots.tolist(), tokens.tolist(), strict=True):
        if s >= 0:
            sets[s].add(t)
    mark(mask, slots.to(DEVICE), tokens.to(DEVICE))
    assert [_members(mask, s) for s in range(4)] == sets


@pytest.mark.parametrize("mark", MARK)
def test_padding_rows_and_tokens_past_the_bitmap_mark_nothing(mark):
    mask = _bitmap([{5}, set()], 64)
    tokens = torch.tensor([7, 64, -1, 1 << 40, 63], device=DEVICE)
    mark(mask, _slots(-1, 0, 1, 1, 1), tokens)
    assert [_members(mask, s) for s in range(2)] == [{5}, {63}]


@pytest.mark.parametrize("mark", MARK)
def test_no_tokens_mark_nothing(mark):
    mask = _bitmap([{5}], 64)
    mark(mask, _slots(), torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert _members(mask, 0) == {5}


def _penalise_in_python(logits, sets, slots, penalty):
    """fp64 oracle, and twice its rounding: to the dtype, and of a division by reciprocal."""
    oracle = logits.double().clone()
    for b, s in enumerate(slots):
        if s < 0:
            continue
        p = torch.tensor(penalty[s], dtype=torch.float32).double().item()
        for t in sets[s]:
            oracle[b, t] = oracle[b, t] * p if oracle[b, t] < 0 else oracle[b, t] / p
    rounding = (torch.finfo(torch.float32).eps + torch.finfo(logits.dtype).eps) / 2
    return oracle, oracle.abs() * rounding * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_each_seen_token_is_penalised_once(vocab_size, dtype):
    sets = _random_sets(3, vocab_size, 0)
    mask = _bitmap(sets, vocab_size)
    penalty = [1.3, 0.7, 1.0]
    slots = [2, -1, 0, 1]
    logits = _logits(4, vocab_size, dtype)
    oracle, budget = _penalise_in_python(logits, sets, slots, penalty)
    for apply in (_launch_apply_repetition_penalty, apply_repetition_penalty_reference):
        got = logits.clone()
        apply(got, mask, _slots(*slots), torch.tensor(penalty, device=DEVICE))
        difference = (got.double() - oracle).abs()
        assert ((got.double() == oracle) | (difference <= budget)).all()
        untouched = oracle == logits.double()
        assert torch.equal(got[untouched], logits[untouched])


def test_repetition_penalty_of_the_reference_equals_hugging_face():
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = _logits(2, 263, torch.float32).cpu()
    prompt = torch.randint(0, 263, (2, 50), generator=torch.Generator().manual_seed(3))
    expected = processors.RepetitionPenaltyLogitsProcessor(1.37)(prompt, logits)
    mask = torch.zeros(2, _num_words(263), dtype=torch.int32)
    mark_seen_reference(mask, torch.tensor([0] * 50 + [1] * 50).int(), prompt.flatten())
    slots = torch.arange(2, dtype=torch.int32)
    penalty = torch.full((2,), 1.37, dtype=torch.float64)
    apply_repetition_penalty_reference(logits, mask, slots, penalty)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_suppressed_tokens_become_minus_infinity(vocab_size, dtype):
    sets = _random_sets(2, vocab_size, 5)
    mask = _bitmap(sets, vocab_size)
    logits = _logits(3, vocab_size, dtype)
    expected = logits.clone()
    expected[0, sorted(sets[1])] = float("-inf")
    expected[2, sorted(sets[0])] = float("-inf")
    for apply in (_launch_apply_suppress_mask, apply_suppress_mask_reference):
        got = logits.clone()
        apply(got, mask, _slots(1, -1, 0))
        assert torch.equal(got, expected)


def test_columns_past_the_row_are_left_alone():
    wide = _logits(2, 80, torch.float32)
    before = wide.clone()
    mask = torch.full((1, 2), -1, dtype=torch.int32, device=DEVICE)
    _launch_apply_suppress_mask(wide[:, :50], mask, _slots(0, 0))
    assert (wide[:, :50] == float("-inf")).all()
    assert torch.equal(wide[:, 50:], before[:, 50:])


def test_empty_batch_is_accepted():
    logits = torch.empty(0, 40, device=DEVICE)
    mask = _bitmap([{1}], 40)
    _launch_apply_suppress_mask(logits, mask, _slots())
    _launch_apply_repetition_penalty(logits, mask, _slots(), torch.ones(1, device=DEVICE))


def test_bitmap_of_another_width_is_rejected():
    mask = torch.zeros(2, 3, dtype=torch.int32)
    slots = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"seen_mask must be int32 \[num_slots, 2\]"):
        apply_repetition_penalty(torch.zeros(1, 64), mask, slots, torch.ones(2))
    with pytest.raises(TypeError, match=r"suppress_mask must be int32 \[num_slots, 2\]"):
        apply_suppress_mask(torch.zeros(1, 64), mask, slots)


def test_slots_of_another_dtype_are_rejected():
    mask = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(TypeError, match="slots must be int32"):
        mark_seen(mask, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


def test_ops_pass_opcheck():
    slots = torch.tensor([1, -1, 0], dtype=torch.int32)
    mask = _bitmap(_random_sets(2, 70, 0), 70).cpu()
    logits = torch.randn(3, 70)
    ops = torch.ops.torch_paged
    torch.library.opcheck(ops.mark_seen.default, (mask, slots, torch.tensor([3, 4, 69])))
    arguments = (logits, mask, slots, torch.tensor([1.2, 0.8]))
    torch.library.opcheck(ops.apply_repetition_penalty.default, arguments)
    torch.library.opcheck(ops.apply_suppress_mask.default, (logits, mask, slots))


def test_ops_compile_without_graph_breaks():
    mask = _bitmap(_random_sets(2, 70, 0), 70)
    slots = _slots(1, -1, 0)
    penalty = torch.tensor([1.2, 0.8], device=DEVICE)
    tokens = torch.tensor([3, 4, 69], device=DEVICE)

    def edit(logits, mask):
        mark_seen(mask, slots, tokens)
        apply_repetition_penalty(logits, mask, slots, penalty)
        apply_suppress_mask(logits, mask, slots)
        return logits

    expected = edit(_logits(3, 70, torch.float32), mask.clone())
    compiled = torch.compile(edit, fullgraph=True, backend="eager")
    assert torch.equal(compiled(_logits(3, 70, torch.float32), mask.clone()), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need CUDA")
def test_graph_replay_equals_eager():
    mask = _bitmap(_random_sets(2, 5000, 0), 5000)
    slots = _slots(1, -1, 0)
    penalty = torch.tensor([1.2, 0.8], device=DEVICE)
    tokens = torch.tensor([3, 4, 69], device=DEVICE)
    logits = _logits(3, 5000, torch.bfloat16)

    def edit(logits, mask):
        mark_seen(mask, slots, tokens)
        apply_repetition_penalty(logits, mask, slots, penalty)

    edit(logits.clone(), mask.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        edit(logits, mask)
    for seed in (1, 2):
        tokens.add_(17)
        logits.copy_(_logits(3, 5000, torch.bfloat16, seed))
        expected, expected_mask = logits.clone(), mask.clone()
        edit(expected, expected_mask)
        graph.replay()
        assert torch.equal(logits, expected)
        assert torch.equal(mask, expected_mask)
