"""The experts of each token: which, and how much each of them counts.

    softmax        s = softmax(logits),  ids = top-k of s + correction,  w = s[ids]
    sigmoid        s = sigmoid(logits),  ids = top-k of s + correction,  w = s[ids]
    topk_softmax   ids = top-k of logits,  w = softmax(logits[ids])
    then           w = w / sum(w) if normalised,  w = scale * w

With groups, the ids are those of experts in the `top_groups` groups of the highest merit, which is
the sum of what the `group_best` best experts of a group have in s + correction.

Scores are float32, as in Hugging Face's routers, which round `w` to the dtype of the logits or
leave it. Among equal scores the kernel takes the expert of the lowest index; a NaN is chosen last,
so that every id is one of an expert whatever the logits are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_paged.ops.registration import register_op
from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton, use_pdl

__all__ = ["SCORINGS", "route_experts", "route_experts_reference"]

#: The names that `scoring` takes.
SCORINGS = ("softmax", "sigmoid", "topk_softmax")


def route_experts_reference(
    logits: Tensor,
    top_k: int,
    scoring: str,
    normalise: bool = False,
    scale: float = 1.0,
    correction: Tensor | None = None,
    float_weights: bool = False,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
) -> tuple[Tensor, Tensor]:
    """Compute the equation with torch."""
    wide = logits.float()
    if scoring == "topk_softmax":
        values, ids = wide.topk(top_k, dim=-1)
        weights = values.softmax(-1)
    else:
        scores = wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()
        merits = scores if correction is None else scores + correction
        if top_groups < num_groups:
            merits = _within_best_groups(merits, num_groups, top_groups, group_best)
        ids = merits.topk(top_k, dim=-1).indices
        weights = scores.gather(-1, ids)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    if scale != 1.0:
        weights = weights * scale
    return weights if float_weights else weights.to(logits.dtype), ids.int()


def _within_best_groups(
    merits: Tensor, num_groups: int, top_groups: int, group_best: int
) -> Tensor:
    groups = merits.unflatten(-1, (num_groups, -1))
    best = groups.topk(group_best, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
    left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
    return groups.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(-2)


@triton.jit
def _within_best_groups_tile(
    merits,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Return merits [BLOCK_G * BLOCK_S], a row of them a group, with -inf outside the best."""
    merits = tl.reshape(merits, [BLOCK_G, BLOCK_S])
    group = tl.arange(0, BLOCK_G)
    member = tl.arange(0, BLOCK_S)[None, :]
    score = tl.max(merits, axis=1)
    if GROUP_BEST == 2:
        first = tl.min(tl.where(merits >= score[:, None], member, BLOCK_S), axis=1)
        score += tl.max(tl.where(member == first[:, None], float("-inf"), merits), axis=1)
    free = group < NUM_GROUPS
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(tl.where(free, score, float("-inf")), axis=0)
        free = free & (group != tl.min(tl.where(free & (score >= best), group, BLOCK_G), axis=0))
    merits = tl.where(free[:, None], float("-inf"), merits)
    return tl.reshape(merits, [BLOCK_G * BLOCK_S])


@triton.jit
def _route_experts_kernel(
    logits_ptr,
    correction_ptr,
    weights_ptr,
    ids_ptr,
    num_experts,
    stride_t,
    scale,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALISE: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the TOP_K experts of one token, the best first."""
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    exists = expert < num_experts
    if TOP_GROUPS < NUM_GROUPS:
        # A group a row of BLOCK // BLOCK_G places.
        size = num_experts // NUM_GROUPS
        group = expert // (BLOCK // BLOCK_G)
        member = expert % (BLOCK // BLOCK_G)
        exists = (group < NUM_GROUPS) & (member < size)
        expert = group * size + member
    correction = tl.zeros([BLOCK], tl.float32)
    if HAS_CORRECTION:
        correction = tl.load(correction_ptr + expert, mask=exists, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    logits = tl.load(logits_ptr + token * stride_t + expert, mask=exists, other=float("-inf"))
    scores = logits.to(tl.float32)
    if SCORING == "softmax":
        scores = tl.exp(scores - tl.max(scores, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    elif SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    else:
        tl.static_assert(SCORING == "topk_softmax", "unknown scoring")
    merits = scores + correction
    merits = tl.where(exists & (merits == merits), merits, float("-inf"))
    if TOP_GROUPS < NUM_GROUPS:
        merits = _within_best_groups_tile(
            merits, NUM_GROUPS, TOP_GROUPS, GROUP_BEST, BLOCK_G, BLOCK // BLOCK_G
        )
    free = exists
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.int32)
    weights = tl.full([SLOTS], float("-inf"), tl.float32)
    for turn in tl.static_range(TOP_K):
        best = tl.max(tl.where(free, merits, float("-inf")), axis=0)
        first = tl.min(tl.where(free & (merits >= best), expert, num_experts), axis=0)
        here = expert == first
        free = free & (expert != first)
        chosen = tl.where(slot == turn, first, chosen)
        weights = tl.where(slot == turn, tl.sum(tl.where(here, scores, 0.0), axis=0), weights)
    used = slot < TOP_K
    if SCORING == "topk_softmax":
        weights = tl.exp(weights - tl.max(weights, axis=0))
        weights = weights / tl.sum(weights, axis=0)
    if NORMALISE:
        weights = weights / tl.sum(tl.where(used, weights, 0.0), axis=0)
    weights = (weights * scale).to(weights_ptr.dtype.element_ty)
    tl.store(weights_ptr + token * TOP_K + slot, weights, mask=used)
    tl.store(ids_ptr + token * TOP_K + slot, chosen, mask=used)


def _launch_route_experts(
    logits: Tensor,
    top_k: int,
    scoring: str,
    normalise: bool = False,
    scale: float = 1.0,
    correction: Tensor | None = None,
    float_weights: bool = False,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    dtype = torch.float32 if float_weights else logits.dtype
    weights = torch.empty((num_tokens, top_k), dtype=dtype, device=logits.device)
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    if num_tokens == 0:
        return weights, ids
    pdl = use_pdl(logits)
    block_g = triton.next_power_of_2(num_groups) if top_groups < num_groups else 1
    block = triton.next_power_of_2(num_experts)
    if block_g > 1:
        block = block_g * triton.next_power_of_2(num_experts // num_groups)
    _route_experts_kernel[(num_tokens,)](
        logits,
        logits if correction is None else correction,
        weights,
        ids,
        num_experts,
        logits.stride(0),
        scale,
        TOP_K=top_k,
        SLOTS=triton.next_power_of_2(top_k),
        SCORING=scoring,
        NORMALISE=normalise,
        HAS_CORRECTION=correction is not None,
        NUM_GROUPS=num_groups,
        TOP_GROUPS=top_groups,
        GROUP_BEST=group_best,
        BLOCK_G=block_g,
        BLOCK=block,
        PDL=pdl,
        num_warps=1 if block <= 256 else 4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return weights, ids


def _route_experts_fake(
    logits: Tensor,
    top_k: int,
    scoring: str,
    normalise: bool = False,
    scale: float = 1.0,
    correction: Tensor | None = None,
    float_weights: bool = False,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    weights = logits.new_empty(shape, dtype=torch.float32 if float_weights else logits.dtype)
    return weights, logits.new_empty(shape, dtype=torch.int32)


_route_experts = register_op(
    "route_experts(Tensor logits, int top_k, str scoring, bool normalise=False, float scale=1.0, "
    "Tensor? correction=None, bool float_weights=False, int num_groups=1, int top_groups=1, "
    "int group_best=1) -> (Tensor, Tensor)",
    cpu=route_experts_reference,
    cuda=_launch_route_experts,
    fake=_route_experts_fake,
)


def route_experts(
    logits: Tensor,
    *,
    top_k: int,
    scoring: str = "softmax",
    normalise: bool = False,
    scale: float = 1.0,
    correction: Tensor | None = None,
    float_weights: bool = False,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 1,
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts for each token.

    Args:
        logits: [num_tokens, num_experts], floating, rows contiguous, row stride free.
        scoring: one of `SCORINGS`.
        normalise: the weights of a token sum to `scale`.
        scale: factor on the weights.
        correction: [num_experts] floating, added to the scores for the choice alone; not with
            "topk_softmax".
        float_weights: return float32 weights instead of rounding them to the dtype of the logits.
        num_groups: experts come in so many groups of neighbours, all of one size.
        top_groups: groups that a token may choose from; as many as there are for no limit. Not
            with "topk_softmax".
        group_best: 1 or 2 of a group's experts make its merit.

    Returns:
        Weights [num_tokens, top_k] and ids [num_tokens, top_k] int32, both contiguous.

    Raises:
        ValueError: a shape, dtype, stride or name is not as above.
    """
    if not torch.compiler.is_compiling():
        _check(logits, top_k, scoring, correction)
        _check_groups(logits, top_k, scoring, num_groups, top_groups, group_best)
    return _route_experts(
        logits,
        top_k,
        scoring,
        normalise,
        scale,
        correction,
        float_weights,
        num_groups,
        top_groups,
        group_best,
    )


def _check(logits: Tensor, top_k: int, scoring: str, correction: Tensor | None) -> None:
    if logits.dim() != 2 or not logits.is_floating_point() or logits.stride(1) != 1:
        raise ValueError(
            "logits must be floating [num_tokens, num_experts] with contiguous rows, got "
            f"{logits.dtype} {list(logits.shape)} with strides {logits.stride()}"
        )
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k must be 1 to {logits.shape[1]} (num_experts), got {top_k}")
    if scoring not in SCORINGS:
        raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}, got {scoring!r}")
    if correction is None:
        return
    if scoring == "topk_softmax":
        raise ValueError('correction has no meaning with scoring="topk_softmax"; leave it out')
    if correction.shape != logits.shape[1:] or not correction.is_contiguous():
        raise ValueError(
            f"correction must be contiguous [{logits.shape[1]}], got {list(correction.shape)}"
        )


def _check_groups(
    logits: Tensor, top_k: int, scoring: str, num_groups: int, top_groups: int, group_best: int
) -> None:
    num_experts = logits.shape[1]
    if num_groups < 1 or num_experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(
            f"num_groups must divide {num_experts} experts and top_groups be 1 to num_groups, got "
            f"{num_groups} and {top_groups}"
        )
    if top_groups == num_groups:
        return
    size = num_experts // num_groups
    if group_best not in (1, 2) or group_best > size or top_k > top_groups * size:
        raise ValueError(
            f"{top_groups} groups of {size} experts must hold the {top_k} chosen ones, and "
            f"group_best be 1 or 2 of them, got group_best={group_best}"
        )
    if scoring == "topk_softmax":
        raise ValueError('groups have no meaning with scoring="topk_softmax"; leave them out')
