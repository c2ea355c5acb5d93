"""What a family is: typed blocks that describe one decoder, without any behaviour.

`patches/` reads a Hugging Face model into a `DecoderSpec`; `plan.lower` turns it into op calls.
Specs hold references to modules, never to parameters: parameters may be replaced between runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
Scoring = Literal["softmax", "sigmoid", "topk_softmax"]
Rotation = Literal["pairs", "halves", "pairs_to_halves"]


@dataclass(frozen=True, slots=True)
class ModuleRef:
    """A module of the user's model and its dotted name there.

    Attributes:
        module: an nn.Module; which attributes it has, the family's row knows.
    """

    name: str
    module: Any


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A normalisation over the last dimension.

    Attributes:
        ref: the module; its `weight` (and `bias` for layer norm) may be absent.
        kind: "rms" or "layer".
        offset: added to the gain, by rms in float32 (1.0 for Gemma), by layer in its own dtype.
        cast_before_gain: True for ``w * x_hat.to(dtype)``, False for ``(w * x_hat).to(dtype)``;
            layer norms round once.
    """

    ref: ModuleRef
    kind: Literal["rms", "layer"]
    eps: float
    offset: float = 0.0
    cast_before_gain: bool = True


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A projection held by one module: ``y = x @ weight.T + bias``."""

    ref: ModuleRef
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class RotaryChange:
    """How the frequencies of a table follow the length of the sequence.

    Attributes:
        limit: longest length of the frequencies in the table's buffer.
        live: name of the buffer with the frequencies of the module's last forward.
        long: frequencies past the limit; empty where dynamic NTK computes them.
        base, factor: of dynamic NTK.
        memory: name of the attribute with the longest length since the last short one, for
            dynamic NTK.
    """

    limit: int
    live: str
    long: tuple[float, ...] = ()
    base: float = 1.0
    factor: float = 1.0
    memory: str = ""


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """One table of rotary angles shared by the layers that name it.

    Attributes:
        ref: the module that owns `inv_freq`.
        buffer: the name of the float buffer [rotary_dim / 2] in that module.
        scaling: factor on cos and sin (`attention_scaling` in transformers).
        change: how the frequencies follow the length, None where they do not.
    """

    ref: ModuleRef
    buffer: str
    scaling: float
    change: RotaryChange | None = None


@dataclass(frozen=True, slots=True)
class RotaryLookup:
    """One table of rotary angles, looked up by position.

    Attributes:
        ref: the module that owns the table.
        buffer: the name of the float buffer [num_positions, rotary_dim] in it: sin | cos.
    """

    ref: ModuleRef
    buffer: str


@dataclass(frozen=True, slots=True)
class PositionsSpec:
    """Learned positions: row ``position + offset`` of the weight of `ref` is added."""

    ref: ModuleRef
    offset: int = 0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Softmax attention with a paged cache.

    Attributes:
        projections: (q, k, v) held by three modules, or one module that holds all of them.
        layout: how one module holds them: "separate" (three modules), "concat" (q | k | v),
            "per_head" (the queries, the key and the value of kv head 0, then of head 1, ...) or
            "quarters" (q | v | k of the first quarter of the heads, then of the second, ...).
        clip: what the projections return is clamped to [-clip, clip]; 0 for no bounds.
        scale: factor on the scores before the softcap.
        window: a query at i sees keys in (i - window, i]; 0 means all of them.
        softcap: ``c * tanh(score / c)`` when above 0.
        alibi: by query head, what is taken off a score for each token of distance; empty for none.
        alibi_rounded: these are products by the index of a key in bfloat16, and scaled as well.
        rotary: index into `DecoderSpec.rotaries`, or None for no rotary embedding.
        interleaved: rotary turns pairs (0, 1), (2, 3), ... instead of the two halves.
        qk_norm_full: q and k are normalised over the whole projection, not per head.
        sinks: module and attribute of the learned sink logits [num_heads].
    """

    projections: tuple[LinearSpec, ...]
    layout: Literal["separate", "concat", "per_head", "quarters"]
    output: LinearSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    rotary: int | None
    interleaved: bool = False
    window: int = 0
    softcap: float = 0.0
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    qk_norm_full: bool = False
    sinks: tuple[ModuleRef, str] | None = None
    alibi: tuple[float, ...] = ()
    alibi_rounded: bool = False
    clip: float = 0.0

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The projections before and behind attention."""
        return (*self.projections, self.output)

    @property
    def norms(self) -> tuple[NormSpec | None, ...]:
        """The norms within attention."""
        return (self.q_norm, self.k_norm)

    @property
    def cache_dims(self) -> tuple[int, int, int]:
        """Heads of the cache, and the widths of a key and of a value in it."""
        return (self.num_kv_heads, self.head_dim, self.v_head_dim)


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention: what the cache keeps of a token serves all heads.

    A token leaves a normalised latent c and a rotated key k, both without heads. Head h attends by
    ``q_h . (K_h c) + r_h . k`` to the values ``V_h c``; K_h and V_h are rows of `expand`.

    Attributes:
        query: the projection to the queries, or the two of a low-rank one.
        query_norm: between these two.
        compress: the projection to latent | key.
        latent_norm: on the latent.
        expand: holds (K_h | V_h) of head 0, then of head 1, ...
        rank: width of the latent.
        nope_dim, rope_dim: widths of q_h and r_h, in this order in the query.
        scale: factor on the scores.
        rotary: index into `DecoderSpec.rotaries`.
        rotation: what turns: neighbouring "pairs", the two "halves", or pairs whose results are
            kept as halves.
    """

    query: tuple[LinearSpec, ...]
    query_norm: NormSpec | None
    compress: LinearSpec
    latent_norm: NormSpec
    expand: LinearSpec
    output: LinearSpec
    num_heads: int
    rank: int
    nope_dim: int
    rope_dim: int
    v_head_dim: int
    scale: float
    rotary: int
    rotation: Rotation

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The projections before, within and behind attention."""
        return (*self.query, self.compress, self.expand, self.output)

    @property
    def norms(self) -> tuple[NormSpec | None, ...]:
        """The norms within attention."""
        return (self.query_norm, self.latent_norm)

    @property
    def cache_dims(self) -> tuple[int, int, int]:
        """Heads of the cache, and the widths of a key (the latent) and of a value (the key)."""
        return (1, self.rank, self.rope_dim)

    @property
    def window(self) -> int:
        """It sees all tokens."""
        return 0


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """A feed-forward block.

    Attributes:
        inputs: (gate, up) in two modules, one module that holds both (gate | up), or, when not
            `gated`, the single up projection.
    """

    inputs: tuple[LinearSpec, ...]
    output: LinearSpec
    activation: Activation
    gated: bool = True


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How tokens choose their experts; see `torch_paged.ops.route_experts`.

    Attributes:
        ref: the module with the `weight` [num_experts, hidden_size] of the logits and, where it
            has one, their `bias`.
        correction: module and attribute of what is added to the scores for the choice alone.
        float_logits: logits are computed in float32 whatever the dtype of the model.
        float_weights: weights stay float32 instead of taking the dtype of the logits.
        num_groups, top_groups: a token chooses within the best groups, where these differ.
        group_best: as many of its experts make the merit of a group.
    """

    ref: ModuleRef
    num_experts: int
    top_k: int
    scoring: Scoring
    normalise: bool = False
    scale: float = 1.0
    correction: tuple[ModuleRef, str] | None = None
    float_logits: bool = False
    float_weights: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A feed-forward block of experts, of which each token takes a few.

    Attributes:
        ref: the module with `gate_up_proj` [num_experts, 2 * inner, hidden_size] and `down_proj`
            [num_experts, hidden_size, inner], and their biases under `..._bias` where it has them.
        activation: as in `MlpSpec`, or "clamped_swiglu" with `alpha` and `limit`.
        transposed: the last two dims of both matrices are the other way round.
        interleaved: gate and up alternate; otherwise all of the gate comes first.
        shared: an MLP that every token takes besides, added to the experts.
        shared_gate: projection to one logit; its sigmoid is a factor on `shared`.
    """

    ref: ModuleRef
    router: RouterSpec
    inner: int
    activation: Activation | Literal["clamped_swiglu"]
    alpha: float = 1.0
    limit: float = 0.0
    transposed: bool = False
    interleaved: bool = False
    shared: MlpSpec | None = None
    shared_gate: LinearSpec | None = None


@dataclass(frozen=True, slots=True)
class OpaqueMlpSpec:
    """A feed-forward block that is called as it is.

    Attributes:
        ref: the block; returns a tensor, or a tuple that begins with it.
        why: it has no fused form.
    """

    ref: ModuleRef
    why: str


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer.

    The residual stream h becomes, for the sequential topology (any norm may be None)::

        h = h + m * post_attention_norm(attention(input_norm(h)))
        h = h + m * post_mlp_norm(mlp(mlp_norm(h)))

    and for the parallel one ``h + attention(input_norm(h)) + mlp(mlp_norm(h))``, where `mlp_norm`
    None means that both branches share `input_norm`. m is `residual_multiplier`.

    Attributes:
        sum_norms: norms of the sums themselves, ``h = norm(h + ...)``, behind attention and
            behind the feed-forward block.
        adds_to_normed: what a branch adds goes to what it has read, ``x = norm(h); h = x + f(x)``.
    """

    attention: AttentionSpec | LatentAttentionSpec
    mlp: MlpSpec | ExpertsSpec | OpaqueMlpSpec
    input_norm: NormSpec | None
    mlp_norm: NormSpec | None
    post_attention_norm: NormSpec | None = None
    post_mlp_norm: NormSpec | None = None
    parallel: bool = False
    residual_multiplier: float = 1.0
    sum_norms: tuple[NormSpec, NormSpec] | None = None
    adds_to_normed: bool = False


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A whole causal LM from token ids to logits.

    Attributes:
        embedding_scale: factor on looked-up embeddings, which the embedding module applies itself;
            already rounded to their dtype.
        embedding_multiplier: factor on all embeddings, those that the caller passes in too.
        logit_scale: factor on the logits.
        logit_softcap: ``c * tanh(logit / c)`` when above 0.
        recompute_length: when a sequence grows past this length, generate() computes all of it
            anew; 0 for never.
        project_in, project_out: from the width of the embeddings to that of the layers, and back
            to that of the head.
        positions: what is added to the embeddings behind `project_in`.
        embedding_norm: on the embeddings, behind all of these.
        max_positions: positions are below this; 0 where there is no end.
        counts_columns: distances between tokens count what the mask hides between them.
        cache_repeats: how often the model's own cache holds each head of keys and values.
    """

    family: str
    embedding: ModuleRef
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    head: LinearSpec
    rotaries: tuple[RotarySpec | RotaryLookup, ...]
    hidden_size: int
    vocab_size: int
    embedding_scale: float = 1.0
    embedding_multiplier: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    recompute_length: int = 0
    project_in: LinearSpec | None = None
    project_out: LinearSpec | None = None
    positions: PositionsSpec | None = None
    embedding_norm: NormSpec | None = None
    max_positions: int = 0
    counts_columns: bool = False
    cache_repeats: int = 1
