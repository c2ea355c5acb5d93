"""Calls of rotary_cache_write with the results of Hugging Face's modules and of fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as rotate_cohere
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_glm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_llama
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
NUM_BLOCKS = 7


@dataclass(frozen=True)
class Norm:
    """A norm module of Hugging Face and the arguments that stand for it."""

    cls: type[torch.nn.Module]
    offset: float = 0.0
    cast_before_gain: bool = True
    full_width: bool = False


NORMS = {
    "none": None,
    "qwen3": Norm(Qwen3RMSNorm),
    "gemma3": Norm(Gemma3RMSNorm, offset=1.0, cast_before_gain=False),
    "olmo2": Norm(Olmo2RMSNorm, cast_before_gain=False, full_width=True),
    "olmoe": Norm(OlmoeRMSNorm, full_width=True),
}


@dataclass(frozen=True)
class Case:
    """Shapes and variants of one call."""

    num_tokens: int = 3
    num_query_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    value_dim: int | None = None
    rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = rotate_llama
    num_freqs: int | None = None
    norm: str = "none"
    block_size: int = 16

    def __str__(self) -> str:
        rotary = self.rotary.__module__.rpartition("_")[2] if self.rotary else "nope"
        return (
            f"T{self.num_tokens}-H{self.num_query_heads}:{self.num_kv_heads}-D{self.head_dim}"
            f":{self.value_dim or self.head_dim}-{rotary}{self.num_freqs or ''}-{self.norm}"
            f"-bs{self.block_size}"
        )


class Inputs:
    """Tensors of a call: q, k and v inside one poisoned projection, and poisoned caches."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str = DEVICE) -> None:
        generator = torch.Generator().manual_seed(case.num_tokens + case.head_dim)
        self.case = case
        num_tokens, d, dv = case.num_tokens, case.head_dim, case.value_dim or case.head_dim
        widths = [case.num_query_heads * d, case.num_kv_heads * d, case.num_kv_heads * dv]
        self.projection = torch.full((num_tokens, sum(widths) + 3), float("nan"), dtype=dtype)
        self.projection[:, : sum(widths)] = 2 * torch.randn(
            num_tokens, sum(widths), generator=generator
        )
        self.projection = self.projection.to(device)
        query, key, value = self.projection[:, : sum(widths)].split(widths, dim=1)
        self.query = query.view(num_tokens, case.num_query_heads, d)
        self.key = key.view(num_tokens, case.num_kv_heads, d)
        self.value = value.view(num_tokens, case.num_kv_heads, dv)
        blocks = (NUM_BLOCKS, case.num_kv_heads, case.block_size)
        self.k_cache = torch.full((*blocks, d), float("nan"), dtype=dtype, device=device)
        self.v_cache = torch.full((*blocks, dv), float("nan"), dtype=dtype, device=device)
        order = torch.randperm(NUM_BLOCKS * case.block_size, generator=generator)
        # The last row of a batch is padding.
        slots = order[:num_tokens].clone()
        slots[1:][-1:] = -1
        self.slot_mapping = slots.to(device)
        self.cos = self.sin = None
        if case.rotary is not None:
            num_freqs = case.num_freqs or d // 2
            positions = torch.randint(0, 500, (num_tokens, 1), generator=generator)
            angles = positions / 10000.0 ** (torch.arange(num_freqs) / num_freqs)
            self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)
        self.modules = [
            self._norm_module(heads, dtype, generator).to(device)
            for heads in (case.num_query_heads, case.num_kv_heads)
        ]

    def _norm_module(
        self, num_heads: int, dtype: torch.dtype, generator: torch.Generator
    ) -> torch.nn.Module:
        norm = NORMS[self.case.norm]
        if norm is None:
            return torch.nn.Identity()
        module = norm.cls((num_heads if norm.full_width else 1) * self.case.head_dim, eps=EPS)
        module.weight.data += 0.3 * torch.randn(module.weight.shape, generator=generator)
        return module.to(dtype).requires_grad_(False)

    def options(self) -> dict[str, object]:
        norm = NORMS[self.case.norm]
        options: dict[str, object] = {
            "interleaved": self.case.rotary in (rotate_cohere, rotate_glm)
        }
        if norm is not None:
            options |= {
                "q_norm": self.modules[0].weight,
                "k_norm": self.modules[1].weight,
                "eps": EPS,
                "norm_offset": norm.offset,
                "cast_before_gain": norm.cast_before_gain,
                "full_width_norm": norm.full_width,
            }
        return options

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        rotary = (self.cos, self.sin)
        caches = (self.k_cache, self.v_cache, self.slot_mapping)
        return (self.query, self.key, self.value, *rotary, *caches)

    def run(self, launch: Callable[..., None]) -> None:
        assert launch(*self.tensors(), **self.options()) is None

    def hugging_face(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and key as the attention of a Hugging Face model computes them."""
        norm = NORMS[self.case.norm]
        rows = [self.query, self.key]
        for i, x in enumerate(rows):
            whole = norm is not None and norm.full_width
            rows[i] = self.modules[i](x.flatten(1) if whole else x).reshape(x.shape)
        return self._rotated(rows, self.query.dtype)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in fp64, without any rounding."""
        norm = NORMS[self.case.norm]
        rows = [self.query.double(), self.key.double()]
        for i, x in enumerate(rows if norm is not None else ()):
            gain = self.modules[i].weight.double() + norm.offset
            x = x.flatten(1) if norm.full_width else x
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
            rows[i] = (x * scale * gain).reshape(rows[i].shape)
        return self._rotated(rows, torch.float64)

    def _rotated(
        self, rows: list[torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotary = self.case.rotary
        if rotary is None or self.cos is None or self.sin is None:
            return rows[0], rows[1]
        if rotary is rotate_cohere:
            # Its apply function works in fp32, even on fp64; its tables hold pairs.
            if dtype == torch.float64:
                rotary = rotate_glm
            else:
                cos, sin = (t.to(dtype).repeat_interleave(2, -1) for t in (self.cos, self.sin))
                return rotary(rows[0], rows[1], cos, sin, unsqueeze_dim=1)
        cos, sin = (torch.cat((t, t), -1).to(dtype) for t in (self.cos, self.sin))
        if rotary is rotate_glm:
            return rotary(rows[0], rows[1], cos, sin, unsqueeze_dim=1)
        # Partial rotation as the attention modules of Phi and StableLM slice it.
        turned = cos.shape[-1]
        parts = rotary(*(x[..., :turned] for x in rows), cos, sin, unsqueeze_dim=1)
        first, second = (
            torch.cat((part, x[..., turned:]), -1) for part, x in zip(parts, rows, strict=True)
        )
        return first, second

    def check_caches(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Exactly the mapped slots hold key and value; all others are still poisoned."""
        bs = self.case.block_size
        for cache, rows in ((self.k_cache, key), (self.v_cache, value)):
            expected = torch.full_like(cache, float("nan"))
            for row, slot in zip(rows, self.slot_mapping.tolist(), strict=True):
                if slot >= 0:
                    expected[slot // bs, :, slot % bs] = row
            torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)
