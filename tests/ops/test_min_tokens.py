import pytest
import torch

from torch_paged.ops.min_tokens import (
    _launch_apply_min_tokens,
    apply_min_tokens,
    apply_min_tokens_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
APPLY = [
    pytest.param(_launch_apply_min_tokens, id="kernel"),
    pytest.param(apply_min_tokens_reference, id="reference"),
    pytest.param(apply_min_tokens, id="op"),
]
INF = float("inf")


def _inputs(vocab_size=50, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(5, vocab_size, generator=g).to(dtype)
    slots = torch.tensor([3, -1, 0, 1, 2], dtype=torch.int32)
    num_generated = torch.tensor([0, 4, 5, 6], dtype=torch.int32)
    min_new_tokens = torch.tensor([1, 5, 5, 0], dtype=torch.int32)
    # Unused entries, a token of another vocabulary, and one id twice.
    eos_ids = torch.tensor([[7, -1, 9], [0, 49, 1000], [3, 4, 5], [2, 2, 2]])
    tensors = (logits, slots, num_generated, min_new_tokens, eos_ids)
    return tuple(tensor.to(DEVICE) for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("apply", APPLY)
def test_end_tokens_are_suppressed_until_the_minimum_is_reached(apply, dtype):
    logits, *state = _inputs(dtype=dtype)
    expected = logits.clone()
    expected[2, [7, 9]] = -INF  # slot 0: 0 of 1
    expected[3, [0, 49]] = -INF  # slot 1: 4 of 5; slot 2 has its 5, slot 3 more than its 0
    apply(logits, *state)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("apply", APPLY)
def test_thousands_of_end_tokens_are_suppressed(apply):
    logits, *state, _ = _inputs(vocab_size=3000)
    eos_ids = torch.arange(500, 2600, device=DEVICE).repeat(4, 1)
    expected = logits.clone()
    expected[2:4, 500:2600] = -INF
    apply(logits, *state, eos_ids)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("apply", APPLY)
def test_slots_without_end_tokens_change_nothing(apply):
    logits, slots, num_generated, min_new_tokens, eos_ids = _inputs()
    expected = logits.clone()
    apply(logits, slots, num_generated, min_new_tokens, eos_ids[:, :0])
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("apply", APPLY)
def test_empty_batch_is_accepted(apply):
    logits, slots, *state = _inputs()
    apply(logits[:0], slots[:0], *state)


def test_wrong_state_is_rejected():
    logits, slots, num_generated, min_new_tokens, eos_ids = _inputs()
    with pytest.raises(TypeError, match="num_generated must be int32"):
        apply_min_tokens(logits, slots, num_generated.long(), min_new_tokens, eos_ids)
    with pytest.raises(TypeError, match="eos_ids must be int64"):
        apply_min_tokens(logits, slots, num_generated, min_new_tokens, eos_ids.int())


def test_op_passes_opcheck():
    arguments = tuple(tensor.cpu() for tensor in _inputs())
    torch.library.opcheck(torch.ops.torch_paged.apply_min_tokens.default, arguments)


def test_op_compiles_without_graph_breaks():
    logits, *state = _inputs()
    expected = logits.clone()
    apply_min_tokens(expected, *state)
    torch.compile(apply_min_tokens, fullgraph=True, backend="eager")(logits, *state)
    assert torch.equal(logits, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need CUDA")
def test_graph_replay_equals_eager():
    logits, slots, num_generated, min_new_tokens, eos_ids = _inputs()
    start = logits.clone()
    apply_min_tokens(logits.clone(), slots, num_generated, min_new_tokens, eos_ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        apply_min_tokens(logits, slots, num_generated, min_new_tokens, eos_ids)
    for _ in range(2):
        num_generated.add_(1)
        logits.copy_(start)
        expected = start.clone()
        apply_min_tokens(expected, slots, num_generated, min_new_tokens, eos_ids)
        graph.replay()
        assert torch.equal(logits, expected)
