"""latent_cache_write: kernel and reference against float64, and Hugging Face's rotations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from torch_paged.ops.latent_attention import latent_cache_write, latent_cache_write_reference
from torch_paged.ops.latent_attention.write import ROTATIONS, _launch_latent_cache_write

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5
# (heads, width of q_h, rank, width of r_h)
SHAPES = [(1, 1, 16, 2), (4, 16, 32, 8), (5, 3, 33, 10), (17, 7, 512, 64)]


def case(
    num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype, block_size: int = 16
) -> dict[str, Tensor]:
    """Tokens as views into wider projections, and poisoned caches of five blocks."""
    heads, nope, rank, rope = shape
    torch.manual_seed(num_tokens + heads)
    projected = torch.randn(num_tokens, heads * (nope + rope) + rank + rope + 3).to(dtype)
    angles = torch.rand(num_tokens, rope // 2) * 6
    query, compressed, _ = projected.split((heads * (nope + rope), rank + rope, 3), dim=1)
    tensors = {
        "query": query.view(num_tokens, heads, nope + rope),
        "compressed": compressed,
        "cos": angles.cos(),
        "sin": angles.sin(),
        "latent_cache": torch.full((5, 1, block_size, rank), float("nan"), dtype=dtype),
        "rope_cache": torch.full((5, 1, block_size, rope), float("nan"), dtype=dtype),
        "norm_weight": torch.randn(rank).to(dtype),
    }
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def rotated(x: Tensor, cos: Tensor, sin: Tensor, rotation: str) -> Tensor:
    """Rotate x [T, H, 2 R] in float64."""
    x, cos, sin = x.double(), cos.double()[:, None], sin.double()[:, None]
    a, b = x.chunk(2, dim=-1) if rotation == "halves" else (x[..., ::2], x[..., 1::2])
    parts = (a * cos - b * sin, b * cos + a * sin)
    if rotation == "pairs":
        return torch.stack(parts, dim=-1).flatten(-2)
    return torch.cat(parts, dim=-1)


def exact(t: dict[str, Tensor], rotation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated ends of the query, latents and keys in float64."""
    rope, rank = t["rope_cache"].shape[3], t["latent_cache"].shape[3]
    latent, key = t["compressed"].double().split((rank, rope), dim=1)
    latent = latent * torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + EPS)
    turn = (t["cos"], t["sin"], rotation)
    ends = rotated(t["query"][..., -rope:], *turn)
    return ends, latent * t["norm_weight"].double(), rotated(key[:, None], *turn)[:, 0]


def run(kernel: bool, t: dict[str, Tensor], rotation: str, **place: Tensor) -> dict[str, Tensor]:
    """Run kernel or reference on copies that keep the strides."""
    device = DEVICE if kernel else "cpu"
    copies = {
        name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        for name, tensor in t.items()
    }
    for name, tensor in t.items():
        copies[name].copy_(tensor)
    function = _launch_latent_cache_write if kernel else latent_cache_write_reference
    moved = {name: tensor.to(device) for name, tensor in place.items()}
    function(*copies.values(), EPS, rotation, **moved)
    return {name: tensor.to(DEVICE) for name, tensor in copies.items()}


def assert_near(got: Tensor, expected: Tensor, roundings: int = 2) -> None:
    eps = torch.finfo(got.dtype).eps
    assert (got.double() - expected).abs().max() <= roundings * eps * expected.abs().max()


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_are_normalised_rotated_and_written(
    shape: tuple[int, int, int, int], dtype: torch.dtype, rotation: str, kernel: bool
) -> None:
    t = case(4, shape, dtype)
    mapping = torch.tensor([79, 0, -1, 17], device=DEVICE)
    out = run(kernel, t, rotation, slot_mapping=mapping)
    nope, rank = shape[1], shape[2]
    ends, latents, keys = exact(t, rotation)
    assert torch.equal(out["query"][..., :nope], t["query"][..., :nope])
    assert_near(out["query"][..., nope:], ends)
    assert_near(out["compressed"][:, :rank], latents, 3)
    assert_near(out["compressed"][:, rank:], keys)
    for name, part in (("latent_cache", slice(0, rank)), ("rope_cache", slice(rank, None))):
        places = out[name].flatten(0, 2)
        for token, place in ((0, 79), (1, 0), (3, 17)):
            assert torch.equal(places[place], out["compressed"][token, part])
        assert places.isnan().all(dim=1).sum() == places.shape[0] - 3


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_rows_place_their_newest_token(block_size: int, kernel: bool) -> None:
    t = case(4, (4, 16, 32, 8), torch.float32, block_size)
    rows = {
        "block_table": torch.tensor([[4, 2], [-1, -1], [0, 3], [1, -1]], dtype=torch.int32),
        "slots": torch.tensor([2, -1, 0, 3], dtype=torch.int32),
        "context_lens": torch.tensor([block_size, 9, block_size - 1, 0], dtype=torch.int32),
    }
    by_rows = run(kernel, t, "pairs", **{k: v.to(DEVICE) for k, v in rows.items()})
    places = [block_size - 1, -1, 2 * block_size, block_size]
    mapping = torch.tensor(places, device=DEVICE)
    by_mapping = run(kernel, t, "pairs", slot_mapping=mapping)
    for name, tensor in by_rows.items():
        torch.testing.assert_close(tensor, by_mapping[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_rotations_are_those_of_hugging_face(rotation: str) -> None:
    t = case(3, (4, 16, 32, 8), torch.float32)
    out = run(False, t, rotation, slot_mapping=torch.arange(3))
    query = t["query"][None, ..., 16:].transpose(1, 2).cpu()
    key = t["compressed"][None, None, :, 32:].cpu()
    cos, sin = t["cos"][None].cpu(), t["sin"][None].cpu()
    if rotation == "pairs":
        angles = torch.complex(cos, sin)
        theirs: Any = apply_rotary_emb(query.contiguous(), key.contiguous(), angles)
    else:
        own = apply_rotary_pos_emb_interleave if rotation != "halves" else apply_rotary_pos_emb
        theirs = own(query, key, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    torch.testing.assert_close(out["query"][..., 16:].cpu(), theirs[0][0].transpose(0, 1))
    torch.testing.assert_close(out["compressed"][:, 32:].cpu(), theirs[1][0, 0])


def test_no_tokens() -> None:
    t = case(0, (4, 16, 32, 8), torch.float32)
    run(True, t, "pairs", slot_mapping=torch.zeros(0, dtype=torch.int64))


def test_opcheck() -> None:
    t = {name: tensor.cpu().clone() for name, tensor in case(2, SHAPES[1], torch.float32).items()}
    op = torch.ops.torch_paged.latent_cache_write.default
    arguments = (*t.values(), EPS, "pairs_to_halves")
    torch.library.opcheck(op, arguments, {"slot_mapping": torch.tensor([3, -1])})


def test_compiles_without_graph_breaks() -> None:
    t = case(2, SHAPES[1], torch.float32)
    mapping = torch.tensor([3, 20], device=DEVICE)

    def step() -> Tensor:
        latent_cache_write(*t.values(), eps=EPS, rotation="pairs", slot_mapping=mapping)
        return t["latent_cache"]

    torch.compile(step, fullgraph=True, backend="eager")()
    assert t["latent_cache"].flatten(0, 2)[[3, 20]].isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotation": "thirds"}, "rotation must be one of"),
        ({"compressed": torch.zeros(2, 39)}, r"compressed must be torch.float32 \[2, 40\]"),
        ({"query": torch.zeros(2, 4, 7)}, "query must be"),
        ({"cos": torch.zeros(2, 3)}, r"cos must be contiguous float32 \[2, 4\]"),
        ({"norm_weight": torch.zeros(31)}, r"norm_weight must be contiguous \[32\]"),
        ({"slot_mapping": None}, "give either slot_mapping, or"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, "give either slot_mapping, or"),
        (
            {"slot_mapping": torch.zeros(2, dtype=torch.int32)},
            "slot_mapping must be contiguous int64",
        ),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "query": torch.zeros(2, 4, 24),
        "compressed": torch.zeros(2, 40),
        "cos": torch.zeros(2, 4),
        "sin": torch.zeros(2, 4),
        "latent_cache": torch.zeros(5, 1, 16, 32),
        "rope_cache": torch.zeros(5, 1, 16, 8),
        "norm_weight": torch.zeros(32),
        "eps": EPS,
        "rotation": "pairs",
        "slot_mapping": torch.arange(2),
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        latent_cache_write(**arguments)
