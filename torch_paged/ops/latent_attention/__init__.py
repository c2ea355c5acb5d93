"""Multi-head latent attention over a paged cache of latents that all heads share.

    c, k = rms_norm(c), rotate(k);  r[h] = rotate(r[h])          written: c and k of each token
    out[h] = sum_j softmax_j(scale (q[h] . c[j] + r[h] . k[j])) c[j]

q[h] is the query of head h taken into the space of the latents, and out[h] a mean of latents: the
projections of keys and values stand before and behind, once for each query instead of each key.
"""

from torch_paged.ops.latent_attention.decode import (
    latent_decode_attention,
    latent_decode_attention_reference,
)
from torch_paged.ops.latent_attention.prefill import (
    latent_prefill_attention,
    latent_prefill_attention_reference,
)
from torch_paged.ops.latent_attention.write import (
    latent_cache_write,
    latent_cache_write_reference,
)

__all__ = [
    "latent_cache_write",
    "latent_cache_write_reference",
    "latent_decode_attention",
    "latent_decode_attention_reference",
    "latent_prefill_attention",
    "latent_prefill_attention_reference",
]
