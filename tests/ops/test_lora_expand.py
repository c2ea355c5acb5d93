"""lora_expand_ against a float64 oracle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_paged.ops.lora_expand import (
    _launch_lora_expand,
    lora_expand_,
    lora_expand_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return (scale * torch.randn(*shape, generator=generator)).to(dtype).to(DEVICE)


@pytest.mark.parametrize(
    ("dtype", "update_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("num_tokens", "n", "rank"), [(1, 5, 1), (65, 64, 16), (70, 130, 17), (3, 63, 64)]
)
def test_kernel_matches_the_oracle(
    num_tokens: int, n: int, rank: int, dtype: torch.dtype, update_dtype: torch.dtype
) -> None:
    wide = randn(num_tokens, n + 5, dtype=dtype)
    before = wide.clone()
    out = wide[:, 3 : 3 + n]
    lora_x = randn(num_tokens, rank + 2, dtype=torch.float32)[:, 1 : 1 + rank]
    update = randn(n, rank, dtype=update_dtype, scale=0.3, seed=1)
    want = out.double() + 1.25 * (lora_x.double() @ update.double().T)
    low = out.clone()
    lora_expand_reference(low, lora_x, update, 1.25)
    _launch_lora_expand(out, lora_x, update, 1.25)
    scale = want.abs().max()
    budget = 2 * ((low.double() - want).abs().max() + torch.finfo(dtype).eps / 2 * scale)
    assert (out.double() - want).abs().max() <= budget
    assert torch.equal(wide[:, :3], before[:, :3])
    assert torch.equal(wide[:, 3 + n :], before[:, 3 + n :])


@pytest.mark.parametrize("shape", [(0, 4, 3), (3, 4, 0)], ids=str)
def test_nothing_to_add_leaves_the_output(shape: tuple[int, int, int]) -> None:
    num_tokens, n, rank = shape
    out = randn(num_tokens, n, dtype=torch.float32)
    before = out.clone()
    lora_x = randn(num_tokens, rank, dtype=torch.float32)
    _launch_lora_expand(out, lora_x, randn(n, rank, dtype=torch.float32), 1.0)
    assert torch.equal(out, before)


def test_the_cpu_kernel_computes_what_peft_computes() -> None:
    out, lora_x, update = torch.randn(3, 8), torch.randn(3, 4), torch.randn(8, 4)
    want = out + F.linear(lora_x, update) * 0.7
    lora_expand_(out, lora_x, update, scale=0.7)
    assert torch.equal(out, want)


def test_opcheck() -> None:
    op = torch.ops.torch_paged.lora_expand_.default
    torch.library.opcheck(op, (torch.randn(3, 8), torch.randn(3, 4), torch.randn(8, 4), 0.5))


def test_compiles_without_graph_breaks() -> None:
    lora_x, update = torch.randn(3, 4), torch.randn(8, 4)

    def step(x: Tensor) -> Tensor:
        out = x * 2
        lora_expand_(out, lora_x, update, scale=2.0)
        return out

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    x = torch.randn(3, 8)
    assert torch.equal(compiled(x), step(x))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"out": torch.randn(3, 7)}, ValueError),
        ({"lora_x": torch.randn(2, 4)}, ValueError),
        ({"update": torch.randn(4, 8).T}, ValueError),
        ({"lora_x": torch.randn(3, 4).double()}, TypeError),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], error: type) -> None:
    good = {"out": torch.randn(3, 8), "lora_x": torch.randn(3, 4), "update": torch.randn(8, 4)}
    with pytest.raises(error, match="must be"):
        lora_expand_(**{**good, **change}, scale=1.0)
