"""The instruction of latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch_paged.decoder.plan_values import OneTarget
from torch_paged.decoder.spec import LatentAttentionSpec


@dataclass(frozen=True, slots=True)
class LatentAttention(OneTarget):
    """target = attention of `query` over cached latents; writes this step's into the cache.

    `compressed` holds latent | key of each token.
    """

    spec: LatentAttentionSpec
    layer: int
    query: str
    compressed: str
    tables: tuple[str, str]
    target: str

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.query, self.compressed, *self.tables)

    def __str__(self) -> str:
        spec = self.spec
        shape = f"{spec.num_heads}x{spec.nope_dim}+{spec.rope_dim} on {spec.rank}+{spec.rope_dim}"
        names = f"{spec.latent_norm.ref.name} | {spec.expand.ref.name}"
        what = f"latent_attention[{self.layer}: {shape}, {spec.rotation}; {names}]"
        return f"{self.target} = {what}({', '.join(self.sources)})"
