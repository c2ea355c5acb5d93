import pytest
import torch

from torch_paged.ops.record_tokens import (
    _launch_record_tokens,
    record_tokens,
    record_tokens_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECORD = [
    pytest.param(_launch_record_tokens, id="kernel"),
    pytest.param(record_tokens_reference, id="reference"),
    pytest.param(record_tokens, id="op"),
]
NAN = float("nan")


def _inputs(dtype=torch.float32, num_rows=5, num_slots=7):
    g = torch.Generator().manual_seed(0)
    # Rows of a wider tensor, as a projection may return them.
    logits = torch.randn(num_rows, 60, generator=g).to(dtype)[:, :50]
    tokens = torch.randint(50, (num_rows,), generator=g)
    slots = torch.randperm(num_slots, generator=g)[:num_rows].to(torch.int32)
    logprobs = torch.randn(num_rows, generator=g)
    failed = torch.ones(num_slots, dtype=torch.bool)
    recorded = torch.full((num_slots,), NAN)
    tensors = (logits, tokens, slots, logprobs, failed, recorded)
    return tuple(tensor.to(DEVICE) for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("record", RECORD)
def test_rows_whose_chosen_logit_is_nan_have_failed(record, dtype):
    logits, tokens, slots, logprobs, failed, recorded = _inputs(dtype)
    logits[1, tokens[1]] = NAN
    logits[2, (tokens[2] + 1) % 50] = NAN  # another one: not what was chosen
    logits[3, tokens[3]] = float("-inf")
    slots[4] = -1
    record(logits, tokens, slots, logprobs, failed, recorded)
    expected = torch.ones(7, dtype=torch.bool, device=DEVICE)
    expected[slots[[0, 2, 3]].long()] = False
    assert torch.equal(failed, expected)
    assert torch.equal(recorded[slots[:4].long()], logprobs[:4])
    others = [s for s in range(7) if s not in slots[:4].tolist()]
    assert recorded[others].isnan().all(), "slots without a row keep what they have"


@pytest.mark.parametrize("record", RECORD)
def test_without_log_probabilities_none_are_written(record):
    logits, tokens, slots, _, failed, recorded = _inputs()
    record(logits, tokens, slots, None, failed, recorded)
    assert recorded.isnan().all()
    assert not failed[slots.long()].any()


@pytest.mark.parametrize("num_rows", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("record", RECORD)
def test_any_number_of_rows(record, num_rows):
    logits, tokens, slots, logprobs, failed, recorded = _inputs(num_rows=num_rows, num_slots=201)
    record(logits, tokens, slots, logprobs, failed, recorded)
    expected = torch.full((201,), NAN, device=DEVICE)
    expected[slots.long()] = logprobs
    torch.testing.assert_close(recorded, expected, rtol=0, atol=0, equal_nan=True)
    assert int((~failed).sum()) == num_rows


def test_wrong_arguments_are_rejected():
    logits, tokens, slots, logprobs, failed, recorded = _inputs()
    with pytest.raises(TypeError, match="tokens must be int64"):
        record_tokens(logits, tokens.int(), slots, logprobs, failed, recorded)
    with pytest.raises(TypeError, match="slots must be int32"):
        record_tokens(logits, tokens, slots.long(), logprobs, failed, recorded)
    with pytest.raises(TypeError, match="failed must be bool"):
        record_tokens(logits, tokens, slots, logprobs, failed.int(), recorded)


def test_op_passes_opcheck():
    arguments = tuple(tensor.cpu() for tensor in _inputs())
    torch.library.opcheck(torch.ops.torch_paged.record_tokens.default, arguments)


def test_op_compiles_without_graph_breaks():
    *inputs, failed, recorded = _inputs()
    compiled = torch.compile(record_tokens, fullgraph=True, backend="eager")
    compiled(*inputs, failed, recorded)
    assert not failed[inputs[2].long()].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need CUDA")
def test_graph_replay_equals_eager():
    logits, tokens, slots, logprobs, failed, recorded = _inputs()
    record_tokens(logits, tokens, slots, logprobs, failed, recorded)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        record_tokens(logits, tokens, slots, logprobs, failed, recorded)
    logits[0, tokens[0]] = NAN
    logprobs.add_(1)
    graph.replay()
    assert failed[slots[0].long()] and not failed[slots[1].long()]
    assert torch.equal(recorded[slots.long()], logprobs)
