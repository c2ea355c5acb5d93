"""head_linear: kernel and reference against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_paged.ops.head_linear import _launch_head_linear, head_linear, head_linear_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter has no bf16 products; on a GPU bf16 is the common case.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
# tokens, heads, in_dim, out_dim; more tokens than the kernel takes, and a wider sum.
SIZES = [(1, 1, 16, 16), (3, 5, 20, 33), (16, 2, 12, 80), (17, 3, 64, 24), (32, 2, 128, 65)]
SIZES += [(33, 2, 16, 16), (2, 2, 513, 16), (0, 2, 16, 16)]


def case(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, columns: bool
) -> tuple[Tensor, Tensor]:
    """Views as a step has them: heads within wider ones, and part of a parameter's rows."""
    tokens, heads, in_dim, out_dim = sizes
    torch.manual_seed(sum(sizes))
    x = torch.randn(tokens, heads, in_dim + 7).to(dtype).to(DEVICE)[..., :in_dim]
    rows, width = (out_dim, in_dim) if columns else (in_dim, out_dim)
    weight = torch.randn(heads, 3 + rows, width).to(dtype).to(DEVICE)[:, 3:]
    return x, weight.transpose(1, 2) if columns else weight


@pytest.mark.parametrize("run", [_launch_head_linear, head_linear_reference])
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_head_meets_its_matrix(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, columns: bool, run: object
) -> None:
    x, weight = case(sizes, dtype, columns)
    out = run(x, weight)
    assert out.is_contiguous() and out.dtype == dtype
    exact = torch.einsum("thk,hkn->thn", x.double(), weight.double())
    # One rounding of the result, and the sum's own in float32.
    sums = torch.einsum("thk,hkn->thn", x.double().abs(), weight.double().abs())
    budget = torch.finfo(dtype).eps * exact.abs() + 4e-7 * sums
    assert ((out.double() - exact).abs() <= budget).all()


def test_a_token_is_the_same_beside_others() -> None:
    x, weight = case((9, 3, 20, 33), torch.float16, True)
    together = _launch_head_linear(x, weight)
    for token in range(9):
        assert torch.equal(_launch_head_linear(x[token : token + 1], weight)[0], together[token])


def test_opcheck() -> None:
    x, weight = (t.cpu() for t in case((3, 5, 20, 33), torch.float32, True))
    torch.library.opcheck(torch.ops.torch_paged.head_linear.default, (x, weight))


def test_compiles_without_graph_breaks() -> None:
    x, weight = case((3, 5, 20, 33), torch.float32, False)
    compiled = torch.compile(head_linear, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, weight), head_linear(x, weight))


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(3, 4), torch.zeros(4, 5, 6), "x must be floating"),
        (torch.zeros(3, 5, 4).transpose(1, 2), torch.zeros(4, 5, 6), "contiguous last dim"),
        (torch.zeros(3, 4, 5), torch.zeros(4, 6, 6), r"weight must be torch.float32 \[4, 5,"),
        (torch.zeros(3, 4, 5), torch.zeros(4, 5, 6).half(), "weight must be torch.float32"),
        (torch.zeros(3, 4, 5), torch.zeros(4, 5, 6, 2)[..., 0], "must be contiguous"),
    ],
)
def test_wrong_arguments_are_named(x: Tensor, weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head_linear(x, weight)
