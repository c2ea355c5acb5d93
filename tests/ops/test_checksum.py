import pytest
import torch

from torch_paged.ops.checksum import (
    ROW_WORDS,
    _launch_checksum,
    add_to_checksum,
    as_words,
    checksum_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _launch(words, first_row=0):
    checksum = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    _launch_checksum(words, first_row, checksum)
    return int(checksum)


def _reference(words, first_row=0):
    checksum = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    checksum_reference(words, first_row, checksum)
    return int(checksum)


def _words(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (count,), generator=g, dtype=torch.int64)
    return words.to(torch.int32).to(DEVICE)


@pytest.mark.parametrize("first_row", [0, 5, 2**40])
@pytest.mark.parametrize(
    "count", [0, 1, 7, ROW_WORDS - 1, ROW_WORDS, ROW_WORDS + 1, 3 * ROW_WORDS + 11]
)
def test_kernel_and_reference_agree(count, first_row):
    words = _words(count)
    assert _launch(words, first_row) == _reference(words, first_row)


def test_the_sum_is_the_one_of_the_docstring():
    words = _words(ROW_WORDS + 3)

    def mix(i):
        h = ((i ^ (i >> 31)) * 0x45D9F3B) & 0x7FFFFFFF
        h = ((h ^ (h >> 15)) * 0x119DE1F3) & 0x7FFFFFFF
        return h ^ (h >> 16)

    total = 0
    for index, word in enumerate(words.tolist()):
        row, column = divmod(index, ROW_WORDS)
        total += word * (2 * mix(9 + row) + 2 * mix(column) + 1)
    total &= 2**64 - 1
    assert _reference(words, 9) & (2**64 - 1) == total


@pytest.mark.parametrize("compute", [_launch, _reference], ids=["kernel", "reference"])
def test_changes_and_exchanges_show(compute):
    words = _words(2 * ROW_WORDS + 100)
    before = compute(words)
    for index in (0, 4095, 4096, 8200):
        for bit in (0, 7, 31):
            changed = words.clone()
            changed[index] ^= -(2**31) if bit == 31 else 1 << bit
            assert compute(changed) != before, (index, bit)
    rows = words[: 2 * ROW_WORDS].view(2, ROW_WORDS)
    for permuted in (words.flip(0), words.roll(1), torch.cat([rows.flip(0).reshape(-1), words])):
        assert compute(permuted) != before
    exchanged = words.clone()
    exchanged[[3, 4]] = words[[4, 3]]
    assert compute(exchanged) != before
    exchanged[[3, 4 + ROW_WORDS]] = words[[4 + ROW_WORDS, 3]]
    assert compute(exchanged) != before


def test_sums_add_up_and_tell_their_order():
    a, b = _words(ROW_WORDS, 1), _words(ROW_WORDS, 2)
    sums = []
    for first, second in ((a, b), (b, a)):
        checksum = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        add_to_checksum(first, checksum)
        add_to_checksum(second, checksum, first_row=1)
        sums.append(int(checksum))
    assert sums[0] != sums[1]
    assert sums[0] == _reference(torch.cat([a, b]))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(3, 5, dtype=torch.bfloat16),
        torch.randn(6, 4).T,
        torch.arange(7, dtype=torch.uint8),
        torch.arange(9, dtype=torch.int64)[1:],
        torch.randn(9, dtype=torch.float16)[1:],
        torch.empty(0),
        torch.tensor(2.5),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}",
)
def test_words_hold_the_memory_of_any_tensor(tensor):
    words = as_words(tensor)
    assert words.dtype == torch.int32 and words.dim() == 1
    data = words.view(torch.uint8)[: tensor.numel() * tensor.element_size()]
    assert torch.equal(data, tensor.contiguous().reshape(-1).view(torch.uint8))
    assert words.numel() == -(-tensor.numel() * tensor.element_size() // 4)


def test_words_are_a_view_where_they_can_be():
    tensor = torch.randn(8)
    assert as_words(tensor).data_ptr() == tensor.data_ptr()


def test_wrong_arguments_are_rejected():
    checksum = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(TypeError, match="call as_words"):
        add_to_checksum(torch.randn(4), checksum)
    with pytest.raises(TypeError, match=r"checksum must be int64 \[1\]"):
        add_to_checksum(torch.zeros(4, dtype=torch.int32), checksum.int())


def test_op_passes_opcheck():
    checksum = torch.zeros(1, dtype=torch.int64)
    torch.library.opcheck(torch.ops.torch_paged.checksum.default, (_words(50).cpu(), 3, checksum))


def test_op_compiles_without_graph_breaks():
    words = _words(50)
    checksum = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    torch.compile(add_to_checksum, fullgraph=True, backend="eager")(words, checksum)
    assert int(checksum) == _reference(words)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need CUDA")
def test_graph_replay_equals_eager():
    words = _words(3 * ROW_WORDS + 5)
    checksum = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    add_to_checksum(words, checksum)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_to_checksum(words, checksum)
    words[7] += 1
    checksum.zero_()
    graph.replay()
    assert int(checksum) == _reference(words)
