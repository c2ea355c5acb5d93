"""experts on a GPU: true shapes, graphs, and the order that dependent launch must keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_paged.ops.experts import CLAMPED_SWIGLU, experts, experts_reference
from torch_paged.ops.route_experts import route_experts, route_experts_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# (experts, experts a token takes, hidden, inner, in the form of gpt-oss)
SHAPES = [
    pytest.param((8, 2, 2048, 8192, False), id="8x1b"),
    pytest.param((32, 4, 2880, 2880, True), id="gpt-oss-20b"),
    pytest.param((128, 8, 2048, 768, False), id="qwen3-30b"),
    pytest.param((6, 2, 321, 115, False), id="odd"),
    pytest.param((6, 2, 321, 115, True), id="odd-gpt-oss"),
]
Shape = tuple[int, int, int, int, bool]
TOKENS = [1, 2, 8, 32, 64, 200]


def make_layer(shape: Shape, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    """Return matrices and biases, and the options of their form."""
    num_experts, _, hidden, inner, gpt_oss = shape
    made = []
    for features, k in ((2 * inner, hidden), (hidden, inner)):
        held = (num_experts, k, features) if gpt_oss else (num_experts, features, k)
        weight = torch.empty(held, dtype=dtype, device="cuda").normal_(std=k**-0.5)
        made.append(weight.transpose(1, 2) if gpt_oss else weight)
    if not gpt_oss:
        return made, {}
    made += [torch.randn(num_experts, n, device="cuda").to(dtype) for n in (2 * inner, hidden)]
    options = {"activation": CLAMPED_SWIGLU, "interleaved": True, "alpha": 1.702, "limit": 7.0}
    return made, options


def make_tokens(shape: Shape, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x, ids and weights."""
    logits = torch.randn(num_tokens, shape[0], device="cuda")
    weights, ids = route_experts(logits, top_k=shape[1], normalise=True)
    return torch.randn(num_tokens, shape[2], device="cuda").to(dtype), ids, weights


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_true_shapes_match_float64(shape: Shape, dtype: torch.dtype, num_tokens: int) -> None:
    layer, options = make_layer(shape, dtype)
    x, ids, weights = make_tokens(shape, num_tokens, dtype)
    out = experts(x, ids, weights, *layer, **options, residual=x)
    # Some tokens and their experts: all of them in float64 would be many gigabytes.
    rows = sorted({0, num_tokens // 2, num_tokens - 1})
    taken = ids[rows].unique()
    places = torch.searchsorted(taken, ids[rows]).int()
    few = [tensor[taken] for tensor in layer]
    low = experts_reference(x[rows], places, weights[rows], *few, **options, residual=x[rows])
    want = experts_reference(
        x[rows].double(),
        places,
        weights[rows].double(),
        *(tensor.double() for tensor in few),
        **options,
        residual=x[rows].double(),
    )
    scale = want.abs().max()
    error = (out[rows] - want).abs().max()
    assert error <= 2 * ((low - want).abs().max() + torch.finfo(dtype).eps / 2 * scale)
    if dtype == torch.float32:
        assert error <= 2e-5 * scale


@pytest.mark.parametrize("num_tokens", [1, 8, 64])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "topk_softmax"])
def test_routers_choose_as_torch_does(scoring: str, num_tokens: int) -> None:
    logits = torch.randn(num_tokens, 128, device="cuda")
    weights, ids = route_experts(logits, top_k=8, scoring=scoring)
    expected, chosen = route_experts_reference(logits, 8, scoring)
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 2, 32, 200])
@pytest.mark.parametrize("shape", SHAPES)
def test_replay_with_other_choices_equals_eager_to_the_bit(shape: Shape, num_tokens: int) -> None:
    layer, options = make_layer(shape, torch.bfloat16)
    x = torch.randn(num_tokens, shape[2], device="cuda").bfloat16()
    logits = torch.randn(num_tokens, shape[0], device="cuda")

    def step() -> Tensor:
        weights, ids = route_experts(logits, top_k=shape[1], normalise=True)
        return experts(x, ids, weights, *layer, **options, residual=x)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        logits.copy_(torch.randn_like(logits))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, step())


@pytest.mark.parametrize("num_tokens", [1, 3, 32])
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[4]])
def test_a_captured_chain_keeps_its_order(shape: Shape, num_tokens: int) -> None:
    """Launches overlap their predecessors; what they read must still be finished."""
    layers = [make_layer(shape, torch.bfloat16)[0] for _ in range(3)]
    options = make_layer(shape, torch.bfloat16)[1]
    routers = [torch.randn(shape[2], shape[0], device="cuda").bfloat16() for _ in layers]
    start = torch.randn(num_tokens, shape[2], device="cuda").bfloat16()

    def chain(synchronize: bool) -> Tensor:
        x = start
        for index in range(24):
            logits = (x @ routers[index % 3]).float()
            weights, ids = route_experts(logits, top_k=shape[1], normalise=True)
            y = experts(x, ids, weights, *layers[index % 3], **options, residual=x)
            x = torch.nn.functional.layer_norm(y, y.shape[-1:])
            if synchronize:
                torch.cuda.synchronize()
        return x

    want = chain(synchronize=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(synchronize=False)
    for _ in range(10):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)


def test_nothing_waits_for_the_device() -> None:
    layer, options = make_layer((6, 2, 64, 48, True), torch.bfloat16)
    for num_tokens in (1, 5, 1000):
        x, ids, weights = make_tokens((6, 2, 64, 48, True), num_tokens, torch.bfloat16)
        experts(x, ids, weights, *layer, **options)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            experts(x, ids, weights, *layer, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_experts_past_two_billion_elements_are_found(num_tokens: int) -> None:
    gate_up = torch.empty(160, 4096, 4096, dtype=torch.bfloat16, device="cuda")
    down = torch.empty(160, 4096, 2048, dtype=torch.bfloat16, device="cuda")
    assert gate_up[-1].storage_offset() > 2**31
    for weight in (gate_up, down):
        weight[-2:].normal_(std=0.02)
    x = torch.randn(num_tokens, 4096, device="cuda").bfloat16()
    ids = torch.tensor([[159, 158]] * num_tokens, dtype=torch.int32, device="cuda")
    weights = torch.full((num_tokens, 2), 0.5, device="cuda")
    out = experts(x, ids, weights, gate_up, down)
    places = ids - 158
    low = experts_reference(x, places, weights, gate_up[-2:], down[-2:])
    few = (gate_up[-2:].double(), down[-2:].double())
    want = experts_reference(x.double(), places, weights.double(), *few)
    error = (out - want).abs().max()
    assert error <= 2 * ((low - want).abs().max() + 2**-9 * want.abs().max())
