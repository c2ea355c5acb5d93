"""rms_norm, add_rms_norm and rms_norm_add against Hugging Face's own modules."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from torch_paged.ops.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_add,
    rms_norm_add_reference,
    rms_norm_reference,
)
from torch_paged.ops.rms_norm.kernel import (
    _launch_add_rms_norm,
    _launch_rms_norm,
    _launch_rms_norm_add,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 64, 80, 144, 224, 4097]
# Module, offset, cast_before_gain.
KINDS = {
    "llama": (LlamaRMSNorm, 0.0, True),
    "gpt-oss": (GptOssRMSNorm, 0.0, False),
    "olmo2": (Olmo2RMSNorm, 0.0, False),
    "gemma": (GemmaRMSNorm, 1.0, False),
    "gemma3": (Gemma3RMSNorm, 1.0, False),
}
INPUTS = ["normal", "spike", "zeros", "tiny", "row-slice"]


def _module(kind: str, width: int, dtype: torch.dtype) -> torch.nn.Module:
    cls, offset, _ = KINDS[kind]
    module = cls(width, eps=EPS)
    generator = torch.Generator().manual_seed(width)
    gain = torch.randn(width, generator=generator)
    # Gains near 2**-8 vanish when Gemma's 1 is added in bf16.
    module.weight.data = (gain * 2.0**-8 if offset else 1.0 + 0.3 * gain).to(dtype)
    return module.to(DEVICE).requires_grad_(False)


def _rows(kind: str, width: int, dtype: torch.dtype, num_rows: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows + width)
    x = torch.randn(num_rows, width, generator=generator)
    if kind == "spike":
        x = x * 0.01
        x[:, width // 2] = 3e4
    elif kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "tiny":
        x = x * 1e-4
    x = x.to(dtype)
    if kind == "row-slice":
        # Poison beside every row: reading past its end shows.
        wide = torch.full((2 * num_rows, width + 9), float("nan"), dtype=dtype)
        wide[::2, 2 : width + 2] = x
        x = wide.to(DEVICE)[::2, 2 : width + 2]
    return x.to(DEVICE)


def _exact(x: torch.Tensor, module: torch.nn.Module, offset: float) -> torch.Tensor:
    x = x.double()
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return x * scale * (module.weight.double() + offset)


def _assert_matches(
    got: torch.Tensor, module: torch.nn.Module, x: torch.Tensor, offset: float
) -> None:
    """Each element within one step of fp64 (four in fp32); nearly all equal to Hugging Face's.

    Two roundings to a low precision are one step at most. Where they fall on the other side of a
    tie than in Hugging Face, which sums in another order, the results are equally good.
    """
    expected = module(x)
    assert got.dtype == expected.dtype and got.shape == expected.shape
    info = torch.finfo(x.dtype)
    steps = 4 if x.dtype == torch.float32 else 1.001
    exact = _exact(x, module, offset)
    # Below the normal numbers a step is absolute, and the gain of at most 2 stretches it.
    limit = steps * info.eps * (exact.abs() + 2 * info.smallest_normal)
    error = (got.double() - exact).abs()
    assert bool((error <= limit).all()), f"worst error {(error / limit).max():.2f} of its limit"
    if x.dtype != torch.float32:
        assert (got != expected).sum() <= 0.01 * got.numel()


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    """torch.empty returns NaN, so that an element left unwritten shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_reference_equals_hugging_face_to_the_bit(kind, width, dtype):
    module = _module(kind, width, dtype).cpu()
    _, offset, cast = KINDS[kind]
    for inputs in INPUTS:
        x = _rows(inputs, width, dtype).cpu()
        got = rms_norm_reference(x, module.weight, EPS, offset, cast)
        torch.testing.assert_close(got, module(x), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_matches_hugging_face(kind, width, dtype):
    module = _module(kind, width, dtype)
    _, offset, cast = KINDS[kind]
    for inputs in INPUTS:
        x = _rows(inputs, width, dtype)
        got = _launch_rms_norm(x, module.weight, EPS, offset, cast)
        _assert_matches(got, module, x, offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_error_is_within_twice_that_of_hugging_face(kind, dtype):
    module = _module(kind, 4097, dtype)
    _, offset, cast = KINDS[kind]
    x = _rows("normal", 4097, dtype, num_rows=5)
    exact = _exact(x, module, offset)
    budget = (module(x).double() - exact).abs().max()
    budget += 0.5 * torch.finfo(dtype).eps * exact.abs().max()
    got = _launch_rms_norm(x, module.weight, EPS, offset, cast)
    assert (got.double() - exact).abs().max() <= 2 * budget


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("launch", [_launch_add_rms_norm, add_rms_norm_reference])
@pytest.mark.parametrize("width", [80, 4097])
@pytest.mark.parametrize("kind", KINDS)
def test_sum_is_the_one_that_hugging_face_holds(kind, width, launch, dtype):
    module = _module(kind, width, dtype)
    _, offset, cast = KINDS[kind]
    for inputs in INPUTS:
        x = _rows(inputs, width, dtype)
        residual = _rows("normal", width, dtype) * 3
        got, total = launch(x, residual, module.weight, EPS, offset, cast)
        expected = residual + x
        torch.testing.assert_close(total, expected, rtol=0, atol=0)
        _assert_matches(got, module, expected, offset)


@pytest.mark.parametrize("gain_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_added_after_the_norm_is_added_as_by_torch(kind, dtype, gain_dtype):
    _, offset, cast = KINDS[kind]
    weight = None if gain_dtype is None else _module(kind, 80, gain_dtype).weight
    x, arguments = _rows("normal", 80, dtype), (weight, EPS, offset, cast)
    for residual_dtype in (dtype, torch.float32):
        residual = _rows("normal", 80, residual_dtype) * 3
        got = _launch_rms_norm_add(x, residual, *arguments)
        expected = residual + _launch_rms_norm(x, *arguments)
        # In float32 a GPU may add without rounding the product.
        rtol = 1e-6 if expected.dtype == torch.float32 else 0
        torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol)
        got = rms_norm_add_reference(x, residual, *arguments)
        expected = residual + rms_norm_reference(x, *arguments)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("launch", [_launch_rms_norm, rms_norm_reference])
def test_gemma_gain_is_added_in_fp32(launch):
    # x_hat is 1, so the output is the gain: 1.00390625 in fp32; 1 + 2**-8 in bf16 would be 1.
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.full((64,), 0.00390625, dtype=torch.bfloat16, device=DEVICE)
    wide = launch(x.float(), weight, 0.0, 1.0, False)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide, torch.full_like(wide, 1.00390625), rtol=0, atol=2.0**-22)
    # Twice the row and a gain of 2**-7: the difference survives rounding to bf16.
    got = launch(x, weight * 2, 0.0, 1.0, False)
    torch.testing.assert_close(got, torch.full_like(got, 1.0078125), rtol=0, atol=0)


@pytest.mark.parametrize("launch", [_launch_rms_norm, rms_norm_reference])
def test_offset_implies_the_fp32_product(launch):
    module = _module("gemma3", 80, torch.bfloat16)
    x = _rows("normal", 80, torch.bfloat16)
    cast, uncast = (launch(x, module.weight, EPS, 1.0, flag) for flag in (True, False))
    torch.testing.assert_close(cast, uncast, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("launch", [_launch_rms_norm, rms_norm_reference])
def test_fp32_gain_promotes_as_in_hugging_face(kind, launch):
    module = _module(kind, 80, torch.float32)
    _, offset, cast = KINDS[kind]
    x = _rows("normal", 80, torch.bfloat16)
    assert module(x).dtype == (torch.float32 if kind == "llama" else torch.bfloat16)
    _assert_matches(launch(x, module.weight, EPS, offset, cast), module, x, offset)


@pytest.mark.parametrize("launch", [_launch_add_rms_norm, add_rms_norm_reference])
def test_bf16_row_is_added_to_an_fp32_residual_in_fp32(launch):
    module = _module("gemma3", 80, torch.bfloat16)
    x = _rows("normal", 80, torch.bfloat16)
    residual = _rows("normal", 80, torch.float32) * 1e-3
    got, total = launch(x, residual, module.weight, EPS, 1.0, False)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, residual + x, rtol=0, atol=0)
    _assert_matches(got, module, residual + x, 1.0)


@pytest.mark.parametrize("launch", [_launch_rms_norm, rms_norm_reference])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_a_strided_projection_count_as_rows(dtype, launch):
    module = _module("llama", 24, dtype)
    projection = _rows("normal", 7 * 24, dtype)
    heads = projection[:, 24 : 6 * 24].view(3, 5, 24)
    assert not heads.is_contiguous()
    _assert_matches(launch(heads, module.weight, EPS), module, heads, 0.0)


@pytest.mark.parametrize("launch", [_launch_rms_norm, rms_norm_reference])
def test_zeros_give_zeros_without_a_weight_too(launch):
    x = torch.zeros(2, 80, dtype=torch.float16, device=DEVICE)
    torch.testing.assert_close(launch(x, None, EPS), x, rtol=0, atol=0)


def test_row_does_not_depend_on_the_batch():
    module = _module("llama", 144, torch.bfloat16)
    x = _rows("normal", 144, torch.bfloat16, num_rows=7)
    alone = torch.cat([_launch_rms_norm(row, module.weight, EPS) for row in x.split(1)])
    torch.testing.assert_close(_launch_rms_norm(x, module.weight, EPS), alone, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 80), (0, 3, 80), (2, 0)])
def test_no_rows_give_no_rows(shape):
    x = torch.empty(shape, device=DEVICE)
    weight = torch.ones(shape[-1], device=DEVICE)
    for norm in (_launch_rms_norm, rms_norm_reference):
        assert norm(x, weight, EPS).shape == shape
    for norm in (_launch_add_rms_norm, add_rms_norm_reference):
        assert [part.shape for part in norm(x, x, weight, EPS)] == [shape, shape]
    for norm in (_launch_rms_norm_add, rms_norm_add_reference):
        assert norm(x, x, weight, EPS).shape == shape


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype, offset):
    x, residual = (_rows(kind, 80, dtype) for kind in ("row-slice", "normal"))
    for weight in (None, torch.ones(80, device=DEVICE)):
        torch.library.opcheck(
            torch.ops.torch_paged.rms_norm.default, (x, weight, EPS, offset, True)
        )
        torch.library.opcheck(
            torch.ops.torch_paged.add_rms_norm.default, (x, residual, weight, EPS, offset, False)
        )
        torch.library.opcheck(
            torch.ops.torch_paged.rms_norm_add.default, (x, residual, weight, EPS, offset, False)
        )


def test_compiles_without_graph_breaks():
    @torch.compile(fullgraph=True, backend="eager")
    def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out, total = add_rms_norm(x, residual, weight, eps=EPS)
        out = rms_norm(out + total, weight, eps=EPS, offset=1.0)
        return rms_norm_add(out, total, weight, eps=EPS)

    x, weight = _rows("normal", 80, torch.float32), torch.ones(80, device=DEVICE)
    out, total = add_rms_norm(x, x, weight, eps=EPS)
    expected = rms_norm(out + total, weight, eps=EPS, offset=1.0)
    expected = rms_norm_add(expected, total, weight, eps=EPS)
    torch.testing.assert_close(block(x, x, weight), expected, rtol=0, atol=0)


@pytest.mark.skipif(DEVICE == "cpu", reason="captures a CUDA graph")
def test_replay_equals_eager():
    module = _module("llama", 4096, torch.bfloat16)
    x, residual = (_rows("normal", 4096, torch.bfloat16, num_rows=n)[:3] for n in (3, 4))
    add_rms_norm(x, residual, module.weight, eps=EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = add_rms_norm(x, residual, module.weight, eps=EPS)
    x.mul_(-2)
    graph.replay()
    for got, expected in zip(
        captured, add_rms_norm(x, residual, module.weight, eps=EPS), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("x", "weight", "error"),
    [
        (torch.ones(4), torch.ones(4), "num_tokens, width"),
        (torch.ones(2, 4, dtype=torch.int32), torch.ones(4), "floating"),
        (torch.ones(4, 2).t(), torch.ones(4), "contiguous"),
        (torch.ones(2, 4), torch.ones(5), r"weight must be contiguous \[4\]"),
        (torch.ones(2, 4), torch.ones(8)[::2], "weight must be contiguous"),
    ],
    ids=["1-d", "integers", "columns", "wide-weight", "strided-weight"],
)
def test_wrong_arguments_are_named(x, weight, error):
    with pytest.raises(ValueError, match=error):
        rms_norm(x, weight, eps=EPS)


def test_wrong_residual_is_named():
    with pytest.raises(ValueError, match=r"residual must be \[2, 4\]"):
        add_rms_norm(torch.ones(2, 4), torch.ones(2, 5), None, eps=EPS)
    with pytest.raises(ValueError, match=r"residual must be \[2, 4\]"):
        rms_norm_add(torch.ones(2, 4), torch.ones(2, 5), None, eps=EPS)


def test_too_wide_rows_are_refused():
    with pytest.raises(NotImplementedError, match="32769"):
        rms_norm(torch.ones(1, 32769), None, eps=EPS)
