"""How families that share Llama's module tree depart from Llama: the columns of the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch_paged.decoder.spec import Scoring


class NormNames(NamedTuple):
    """Names of a layer's norms; None where a family has none.

    Attributes:
        input: before attention.
        mlp: before the feed-forward block; None in a parallel block that shares `input`.
        post_attention, post_mlp: on what attention and feed-forward add to the residual; the
            latter may be within the feed-forward block, and absent where that has no experts.
    """

    input: str | None
    mlp: str | None
    post_attention: str | None = None
    post_mlp: str | None = None


class MlpNames(NamedTuple):
    """Names of the projections: gate and up, one module with both, or up alone when not gated."""

    inputs: tuple[str, ...]
    output: str
    gated: bool = True


class ExpertsNames(NamedTuple):
    """Where a family's experts are and how its router chooses; see `RouterSpec`.

    Attributes:
        block: of the layer: the module with `router` and `experts`, or else a plain MLP.
        normalise: None asks the router's `norm_topk_prob`.
        correction: below the router, of the attribute that is added for the choice.
        group_best: experts of a group that make its merit, for routers with groups; 0 where a
            family's choice among groups has no fused form.
        clamped: the experts clamp gate and up, as gpt-oss does.
        shared: of the layer, the MLP that every token takes besides; it may be None there.
        shared_mlp: names of its projections.
        shared_gate: of the layer, the projection to its gate.
    """

    block: str = "mlp"
    router: str = "gate"
    experts: str = "experts"
    scoring: Scoring = "softmax"
    normalise: bool | None = None
    correction: str | None = None
    float_logits: bool = False
    float_weights: bool = False
    group_best: int = 0
    clamped: bool = False
    shared: str | None = None
    shared_mlp: MlpNames = MlpNames(("gate_proj", "up_proj"), "down_proj")
    shared_gate: str | None = None


PRE_NORMS = NormNames("input_layernorm", "post_attention_layernorm")
POST_NORMS = NormNames(None, None, "post_attention_layernorm", "post_feedforward_layernorm")
GEMMA_NORMS = NormNames(
    "input_layernorm",
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
)
GLM4_NORMS = NormNames(
    "input_layernorm",
    "post_attention_layernorm",
    "post_self_attn_layernorm",
    "post_mlp_layernorm",
)
SHARED_NORM = NormNames("input_layernorm", None)

GATED_MLP = MlpNames(("gate_proj", "up_proj"), "down_proj")
PACKED_MLP = MlpNames(("gate_up_proj",), "down_proj")
PLAIN_MLP = MlpNames(("up_proj",), "down_proj", gated=False)


@dataclass(frozen=True, slots=True)
class Traits:
    """One row: how a family departs from Llama.

    Attributes:
        norm_kind, norm_offset, cast_before_gain: see `NormSpec`.
        norm_eps: for norms that do not say it.
        norms: the layer's norms and so its topology.
        final_norm: the norm behind the last layer.
        parallel: attention and feed-forward read the same residual; None asks the config.
        head_norms: names of the q and k norms, or None.
        head_norms_full: those norms span the whole projection instead of a head.
        fused_qkv: one module holds q, k and v.
        output: the projection behind attention.
        mlp: the feed-forward projections.
        experts: the experts of layers that have them.
        sinks: attention has learned sink logits under this name.
        interleaved: rotary turns neighbouring pairs instead of halves.
        latent: attention is latent attention, which turns neighbouring pairs, halves, or what the
            config's `rope_interleave` says.
        rotary_layers: the layers with rotary: all, those whose attention says `use_rope`, or
            those with a window.
        scaled_embedding: the embedding module multiplies by its `embed_scale`.
        multipliers: the config's multipliers on embeddings, residuals and logits apply.
        residual_scale: attribute of a layer with the factor on what it adds to the residual.
        hidden_divisor: field of the config that the hidden states are divided by for the logits.
        window: where a layer's window is found: on the attention module, or in the config for
            every layer, or nowhere.
        caps_scores: attention applies the `attn_logit_softcapping` that its module holds.
        recomputes: generate() drops the cache when a sequence grows past the config's
            `original_max_position_embeddings`.
        absent: config fields that change the arithmetic; a set one is refused.
    """

    norm_kind: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    cast_before_gain: bool = True
    norm_eps: float | None = None
    norms: NormNames = PRE_NORMS
    final_norm: str = "norm"
    parallel: bool | None = False
    head_norms: tuple[str, str] | None = None
    head_norms_full: bool = False
    fused_qkv: bool = False
    output: str = "o_proj"
    mlp: MlpNames = GATED_MLP
    experts: ExpertsNames | None = None
    sinks: str | None = None
    interleaved: bool = False
    latent: Literal["pairs", "halves", "config"] | None = None
    rotary_layers: Literal["all", "use_rope", "windowed"] = "all"
    scaled_embedding: bool = False
    multipliers: bool = False
    residual_scale: str | None = None
    hidden_divisor: str | None = None
    window: Literal["module", "config", "none"] = "none"
    caps_scores: bool = True
    recomputes: bool = False
    absent: tuple[str, ...] = ()
