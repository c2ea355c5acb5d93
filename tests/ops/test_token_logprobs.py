import pytest
import torch

from torch_paged.ops.token_logprobs import (
    _launch_token_logprobs,
    token_logprobs,
    token_logprobs_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One column, odd sizes, the tile of 4096 +-1, several tiles.
SHAPES = [(1, 1), (3, 7), (2, 1000), (2, 4095), (1, 4096), (3, 4097), (2, 12301)]


def _inputs(num_rows, vocab_size, dtype, seed=0, scale=5.0):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_rows, vocab_size, generator=g) * scale).to(dtype)
    tokens = torch.randint(0, vocab_size, (num_rows,), generator=g)
    if num_rows > 1:
        tokens[0], tokens[1] = 0, vocab_size - 1
    return logits.to(DEVICE), tokens.to(DEVICE)


def _oracle(logits, tokens):
    return torch.log_softmax(logits.double(), dim=-1).gather(1, tokens[:, None])[:, 0]


def _budget(logits, tokens):
    """2 x (error of the fp32 reference + one rounding of the largest quantity involved)."""
    oracle = _oracle(logits, tokens)
    reference = token_logprobs_reference(logits, tokens)
    largest = torch.maximum(oracle.abs(), logits.double().abs().amax())
    rounding = largest.clamp(min=1.0) * torch.finfo(torch.float32).eps
    return 2 * ((reference.double() - oracle).abs() + rounding)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"B{s[0]}-V{s[1]}")
def test_kernel_stays_within_the_budget(shape, dtype):
    logits, tokens = _inputs(*shape, dtype)
    got = _launch_token_logprobs(logits, tokens)
    assert got.dtype == torch.float32
    error = (got.double() - _oracle(logits, tokens)).abs()
    assert (error <= _budget(logits, tokens)).all()


def test_huge_logits_do_not_overflow():
    logits = torch.full((2, 5000), -3.0e38, device=DEVICE)
    logits[:, 4500] = 3.0e38
    tokens = torch.tensor([4500, 0], device=DEVICE)
    got = _launch_token_logprobs(logits, tokens)
    assert got[0].item() == 0.0
    assert got[1].item() == float("-inf")


def test_suppressed_tokens_and_tiles_are_ignored():
    logits, _ = _inputs(2, 9000, torch.float32)
    logits[:, :8192] = float("-inf")  # two whole tiles
    tokens = torch.tensor([8500, 3], device=DEVICE)
    got = _launch_token_logprobs(logits, tokens)
    error = (got[:1].double() - _oracle(logits[:1], tokens[:1])).abs()
    assert (error <= _budget(logits[:1], tokens[:1])).all()
    assert got[1].item() == float("-inf")


def test_nan_reaches_only_its_own_row():
    logits, tokens = _inputs(3, 5000, torch.float32)
    clean = _launch_token_logprobs(logits, tokens)
    logits[1, 4999] = float("nan")
    got = _launch_token_logprobs(logits, tokens)
    assert got[1].isnan()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


def test_token_out_of_range_gives_zero():
    logits, _ = _inputs(3, 50, torch.float32)
    tokens = torch.tensor([-1, 50, 49], device=DEVICE)
    got = _launch_token_logprobs(logits, tokens)
    assert got[:2].tolist() == [0.0, 0.0] and got[2].item() < 0
    assert token_logprobs_reference(logits, tokens)[:2].tolist() == [0.0, 0.0]


def test_row_result_does_not_depend_on_the_batch():
    logits, tokens = _inputs(6, 9000, torch.bfloat16)
    together = _launch_token_logprobs(logits, tokens)
    for i in range(6):
        alone = _launch_token_logprobs(logits[i : i + 1], tokens[i : i + 1])
        assert torch.equal(alone, together[i : i + 1])


def test_row_stride_is_free():
    wide, tokens = _inputs(2, 600, torch.bfloat16)
    view = wide[:, :500]
    tokens = tokens.clamp(max=499)
    expected = _launch_token_logprobs(view.contiguous(), tokens)
    assert torch.equal(_launch_token_logprobs(view, tokens), expected)


def test_empty_batch_gives_nothing():
    tokens = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert _launch_token_logprobs(torch.empty(0, 9, device=DEVICE), tokens).shape == (0,)


def test_reference_equals_log_softmax():
    logits, tokens = (tensor.cpu() for tensor in _inputs(4, 321, torch.bfloat16))
    expected = logits.float().log_softmax(-1)[torch.arange(4), tokens]
    assert torch.equal(token_logprobs_reference(logits, tokens), expected)


def test_tokens_of_another_shape_are_rejected():
    with pytest.raises(TypeError, match=r"tokens must be int64 \[2\]"):
        token_logprobs(torch.zeros(2, 5), torch.zeros(3, dtype=torch.int64))


def test_op_passes_opcheck():
    logits, tokens = (tensor.cpu() for tensor in _inputs(3, 50, torch.float32))
    torch.library.opcheck(torch.ops.torch_paged.token_logprobs.default, (logits, tokens))


def test_op_compiles_without_graph_breaks():
    logits, tokens = _inputs(3, 50, torch.float32)
    compiled = torch.compile(token_logprobs, fullgraph=True, backend="eager")
    assert torch.equal(compiled(logits, tokens), token_logprobs(logits, tokens))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need CUDA")
def test_graph_replay_equals_eager():
    logits, tokens = _inputs(3, 20000, torch.bfloat16)
    token_logprobs(logits, tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = token_logprobs(logits, tokens)
    for seed in (1, 2):
        new_logits, new_tokens = _inputs(3, 20000, torch.bfloat16, seed)
        logits.copy_(new_logits)
        tokens.copy_(new_tokens)
        graph.replay()
        assert torch.equal(got, token_logprobs(logits, tokens))
