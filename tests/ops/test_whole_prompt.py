"""Attention within a whole prompt: where cuDNN serves it, and its error there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_paged.ops.paged_attention.whole_prompt import (
    WHOLE_PROMPT_TOKENS,
    whole_prompt_attention,
)

HEADS = [(16, 8, 128), (32, 8, 64), (8, 8, 128), (6, 2, 96)]
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_heads(
    heads: tuple[int, int, int], num_tokens: int, dtype: torch.dtype, device: str
) -> list[Tensor]:
    """Return query, key and value as views of one projection."""
    num_heads, num_kv_heads, dim = heads
    width = (num_heads + 2 * num_kv_heads) * dim
    projection = torch.randn(num_tokens, width, device=device).to(dtype)
    parts = (num_heads, num_kv_heads, num_kv_heads)
    return list(projection.view(num_tokens, -1, dim).split(parts, dim=1))


def oracle(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 100])
def test_matches_float64_on_a_cpu(heads: tuple[int, int, int], num_tokens: int) -> None:
    parts = make_heads(heads, num_tokens, torch.float32, "cpu")
    out = whole_prompt_attention(*parts, 0.3)
    assert out is not None and out.shape == parts[0].shape
    want = oracle(*(part.double() for part in parts), 0.3)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_half_precision_on_a_cpu_is_left_to_the_paged_reference() -> None:
    for num_tokens in (8, WHOLE_PROMPT_TOKENS):
        parts = make_heads((4, 2, 16), num_tokens, torch.bfloat16, "cpu")
        assert whole_prompt_attention(*parts, 0.25) is None


@CUDA
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("num_tokens", [WHOLE_PROMPT_TOKENS, 1500, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matches_float64(heads: tuple[int, int, int], num_tokens: int, dtype: torch.dtype) -> None:
    parts = make_heads(heads, num_tokens, dtype, "cuda")
    scale = 1.3 * heads[2] ** -0.5
    out = whole_prompt_attention(*parts, scale)  # 1500 is padded: other lengths share its plan
    if torch.cuda.get_device_capability() < (9, 0):
        assert out is None
        return
    assert out is not None and out.shape == parts[0].shape and out.dtype == dtype
    want = oracle(*(part.double() for part in parts), scale)
    low = oracle(*parts, scale)
    budget = 2 * ((low - want).abs().max() + torch.finfo(dtype).eps / 2 * want.abs().max())
    assert (out - want).abs().max() <= budget


@CUDA
def test_replay_equals_eager_to_the_bit_and_padding_stays_behind() -> None:
    parts = make_heads((16, 8, 128), 1536, torch.bfloat16, "cuda")
    if whole_prompt_attention(*parts, 0.1) is None:
        assert torch.cuda.get_device_capability() < (9, 0)
        return
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = whole_prompt_attention(*parts, 0.1)
    for part in parts:
        part.copy_(torch.randn_like(part))
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, whole_prompt_attention(*parts, 0.1))
    before = out[:1100].clone()
    for part in parts:
        part[1100:] = 1e3  # padding is finite: it is computed from a real token
    graph.replay()
    assert torch.equal(out[:1100], before)


@CUDA
def test_it_draws_no_random_numbers() -> None:
    parts = make_heads((16, 8, 128), 2048, torch.bfloat16, "cuda")
    before = torch.cuda.get_rng_state()
    whole_prompt_attention(*parts, 0.1)
    assert torch.equal(torch.cuda.get_rng_state(), before)


@CUDA
def test_a_user_who_turned_cudnn_off_keeps_it_off() -> None:
    parts = make_heads((16, 8, 128), 1024, torch.bfloat16, "cuda")
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert whole_prompt_attention(*parts, 0.1) is None
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
