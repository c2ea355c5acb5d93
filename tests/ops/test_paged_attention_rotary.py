"""What fused decode does before attention: q/k norm, rotation, and the write to the cache."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torch_paged.ops import paged_attention as ops
from torch_paged.ops.paged_attention.decode_launch import _launch_fused_decode_attention

sys.path.append(str(Path(__file__).parent))

from paged_attention_case import DEVICE, DTYPES, dense_attention, make_pool  # noqa: E402


def _norm(x: Tensor, weight: Tensor, offset: float, cast_before_gain: bool) -> Tensor:
    """RMS norm in float64 with the roundings of Hugging Face's modules."""
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    if cast_before_gain and offset == 0:
        normed = normed.to(x.dtype).double()
    return (normed * (weight.double() + offset)).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate in float64 as complex numbers, rounded once."""
    half = cos.shape[1]
    pairs = x[..., : 2 * half].double()
    if interleaved:
        pairs = pairs.unflatten(-1, (half, 2))
    else:
        pairs = torch.stack((pairs[..., :half], pairs[..., half:]), dim=-1)
    turned = torch.view_as_complex(pairs.contiguous())
    turned = turned * torch.complex(cos.double(), sin.double())[:, None]
    if interleaved:
        out = torch.view_as_real(turned).flatten(-2)
    else:
        out = torch.cat((turned.real, turned.imag), dim=-1)
    return torch.cat((out.to(x.dtype), x[..., 2 * half :]), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "half", "interleaved"),
    [
        (32, 16, False),
        (32, 16, True),
        (40, 8, False),
        (40, 10, True),
        (80, 16, False),
        (128, 64, False),
    ],
    ids=["half", "interleaved", "partial", "partial-interleaved", "partial-80", "128"],
)
@pytest.mark.parametrize(
    ("offset", "cast_before_gain"),
    [(0.0, True), (0.0, False), (1.0, True), (None, True)],
    ids=["llama", "olmo", "gemma", "plain"],
)
@pytest.mark.parametrize("run", ["kernel", "reference"])
def test_norm_and_rotation_come_before_attention(
    run: str,
    offset: float | None,
    cast_before_gain: bool,
    head_dim: int,
    half: int,
    interleaved: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    pool = make_pool(
        [5, 0, 20], num_kv_heads=2, head_dim=head_dim, dtype=dtype, new_token_cached=False
    )
    # Views into one projection, as the decoder holds them.
    projection = torch.randn(3, (6 + 2 + 2) * head_dim + 8, device=DEVICE).to(dtype)
    query, key, value = projection[:, : 10 * head_dim].view(3, 10, head_dim).split((6, 2, 2), 1)
    angle = torch.rand(3, half, device=DEVICE) * 6
    cos, sin = angle.cos(), angle.sin()
    q_norm = torch.rand(head_dim, device=DEVICE).to(dtype) + 0.5
    k_norm = torch.rand(head_dim, device=DEVICE).to(dtype) + 0.5
    norm = {}
    q, k = query, key
    if offset is not None:
        norm = {"q_norm": q_norm, "k_norm": k_norm, "eps": 1e-6, "norm_offset": offset}
        norm["cast_before_gain"] = cast_before_gain
        q = _norm(query, q_norm, offset, cast_before_gain)
        k = _norm(key, k_norm, offset, cast_before_gain)
    q, k = _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)

    counters = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    arguments = [query, key, value, cos, sin, pool.k_cache, pool.v_cache, pool.block_table]
    arguments += [pool.slots, pool.context_lens, counters]
    if run == "kernel":
        output = _launch_fused_decode_attention(*arguments, 0.25, interleaved=interleaved, **norm)
    else:
        arguments = [a.cpu() for a in arguments]
        norm = {name: v.cpu() if isinstance(v, Tensor) else v for name, v in norm.items()}
        output = ops.fused_decode_attention_reference(
            *arguments, 0.25, interleaved=interleaved, **norm
        ).to(DEVICE)
    k_cache, v_cache = arguments[5].to(DEVICE), arguments[6].to(DEVICE)

    eps = torch.finfo(dtype).eps
    for row, keys in enumerate(pool.keys):
        if len(keys) == 0:
            assert (output[row] == 0).all()
            continue
        slot, index = int(pool.slots[row]), len(keys) - 1
        block = pool.block_table[slot, index // 16]
        # Two roundings may each go the other way; in float32 the arithmetic itself rounds too.
        written = k_cache[block, :, index % 16]
        limit = 4 * eps * k[row].abs().max()
        assert (written.double() - k[row].double()).abs().max() <= limit
        assert torch.equal(v_cache[block, :, index % 16], value[row])
        all_keys = torch.cat((keys[:-1], k[row : row + 1]))
        all_values = torch.cat((pool.values[row][:-1], value[row : row + 1]))
        dense = (q[row : row + 1], all_keys, all_values)
        exact = dense_attention(*dense, torch.float64, scale=0.25)
        low = dense_attention(*dense, dtype, scale=0.25)
        rounding = eps * exact.abs().max()
        budget = 2 * ((low.double() - exact).abs().max() + 4 * rounding)
        assert (output[row].double() - exact[0]).abs().max() <= budget
