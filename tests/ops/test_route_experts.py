"""route_experts: kernel and reference against float64, and against Hugging Face's routers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_paged.ops.route_experts import (
    SCORINGS,
    _launch_route_experts,
    route_experts,
    route_experts_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(1, 1, 1), (3, 8, 2), (5, 33, 4), (2, 128, 8), (1, 257, 16)]
# (scoring, with a correction)
KINDS = [*((scoring, False) for scoring in SCORINGS), ("softmax", True), ("sigmoid", True)]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def oracle(
    logits: Tensor,
    top_k: int,
    scoring: str,
    normalise: bool,
    scale: float,
    correction: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The equation in float64."""
    wide = logits.double()
    scores = wide if scoring == "topk_softmax" else None
    if scores is None:
        scores = wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()
    merits = scores if correction is None else scores + correction.double()
    ids = merits.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if scoring == "topk_softmax":
        weights = weights.softmax(-1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, ids.int()


@pytest.mark.parametrize("run", [_launch_route_experts, route_experts_reference])
@pytest.mark.parametrize("normalise", [False, True], ids=["as-is", "normalised"])
@pytest.mark.parametrize(("scoring", "corrected"), KINDS)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SIZES, ids=str)
def test_choice_and_weights_match_the_oracle(
    tokens: int,
    experts: int,
    top_k: int,
    scoring: str,
    corrected: bool,
    normalise: bool,
    run: object,
) -> None:
    logits = randn(tokens, experts + 3)[:, :experts]
    correction = 0.3 * randn(experts, seed=1) if corrected else None
    weights, ids = run(logits, top_k, scoring, normalise, 2.5, correction, True)
    expected, chosen = oracle(logits, top_k, scoring, normalise, 2.5, correction)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=1e-7)


def within_best_groups(merits: Tensor, groups: int, kept: int, best: int) -> Tensor:
    """Rule out, token by token, the experts outside the best groups."""
    out = torch.full_like(merits, float("-inf"))
    size = merits.shape[1] // groups
    for token, row in enumerate(merits.unflatten(1, (groups, size))):
        scores = [float(group.sort(descending=True).values[:best].sum()) for group in row]
        for group in sorted(range(groups), key=lambda g: -scores[g])[:kept]:
            out[token, group * size : (group + 1) * size] = row[group]
    return out


@pytest.mark.parametrize("run", [_launch_route_experts, route_experts_reference])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("experts", "groups", "kept", "best", "top_k"),
    [(8, 2, 1, 1, 3), (8, 4, 2, 2, 4), (15, 3, 2, 1, 5), (33, 11, 4, 2, 2), (160, 8, 3, 1, 6)],
    ids=str,
)
def test_a_token_chooses_within_its_best_groups(
    experts: int, groups: int, kept: int, best: int, top_k: int, scoring: str, run: object
) -> None:
    logits = randn(5, experts + 3)[:, :experts]
    correction = 0.3 * randn(experts, seed=1)
    weights, ids = run(logits, top_k, scoring, True, 2.5, correction, True, groups, kept, best)
    wide = logits.double()
    scores = wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()
    merits = within_best_groups(scores + correction.double(), groups, kept, best)
    chosen = merits.topk(top_k, dim=-1).indices
    expected = scores.gather(-1, chosen)
    expected = expected / expected.sum(-1, keepdim=True) * 2.5
    assert torch.equal(ids, chosen.int())
    torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=1e-7)


def test_groups_leave_every_id_an_expert_whatever_the_logits_are() -> None:
    logits = torch.full((2, 9), float("nan"), device=DEVICE)
    logits[1, 4] = 1.0
    _, ids = _launch_route_experts(logits, 3, "sigmoid", num_groups=3, top_groups=2, group_best=2)
    for row in ids.tolist():
        assert len(set(row)) == 3 and all(0 <= expert < 9 for expert in row)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_weights_take_the_dtype_of_the_logits_unless_asked(
    scoring: str, dtype: torch.dtype
) -> None:
    logits = randn(6, 16, dtype=dtype)
    rounded, ids = _launch_route_experts(logits, 3, scoring)
    full, same = _launch_route_experts(logits, 3, scoring, float_weights=True)
    assert (rounded.dtype, full.dtype) == (dtype, torch.float32)
    assert torch.equal(rounded, full.to(dtype)) and torch.equal(ids, same)
    chosen = logits.gather(-1, ids.long()).float().sort(-1).values
    assert torch.equal(chosen, logits.topk(3).values.float().sort(-1).values)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_equal_scores_take_the_first_experts(scoring: str) -> None:
    _, ids = _launch_route_experts(torch.ones(2, 12, device=DEVICE), 4, scoring)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_every_id_is_an_expert_whatever_the_logits_are(value: float, scoring: str) -> None:
    logits = torch.full((2, 5), value, device=DEVICE)
    logits[1, 3] = 1.0
    _, ids = _launch_route_experts(logits, 4, scoring)
    for row in ids.tolist():
        assert len(set(row)) == 4 and all(0 <= expert < 5 for expert in row)


def test_nan_stays_in_its_row() -> None:
    logits = randn(3, 8)
    logits[1, 2] = float("nan")
    weights, _ = _launch_route_experts(logits, 2, "softmax")
    assert weights.isnan().any(dim=1).tolist() == [False, True, False]


def test_no_tokens() -> None:
    weights, ids = route_experts(torch.zeros(0, 4, device=DEVICE), top_k=2)
    assert weights.shape == ids.shape == (0, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "top_k must be 1 to 4"),
        ({"top_k": 5}, "top_k must be 1 to 4"),
        ({"scoring": "max"}, "scoring must be one of"),
        ({"logits": torch.zeros(4)}, "num_experts"),
        ({"logits": torch.zeros(4, 3).T}, "contiguous rows"),
        ({"correction": torch.zeros(3)}, r"correction must be contiguous \[4\]"),
        ({"correction": torch.zeros(4), "scoring": "topk_softmax"}, "no meaning"),
        ({"num_groups": 3}, "num_groups must divide 4 experts"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups be 1 to num_groups"),
        ({"num_groups": 4, "top_groups": 1}, "must hold the 2 chosen ones"),
        ({"num_groups": 2, "group_best": 3}, "got group_best=3"),
        ({"num_groups": 2, "scoring": "topk_softmax"}, "groups have no meaning"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, object], message: str) -> None:
    arguments = {"logits": torch.zeros(3, 4), "top_k": 2, **changes}
    with pytest.raises(ValueError, match=message):
        route_experts(arguments.pop("logits"), **arguments)


def test_opcheck() -> None:
    op = torch.ops.torch_paged.route_experts.default
    torch.library.opcheck(op, (torch.randn(3, 8), 2, "softmax"), {"normalise": True})
    arguments = (torch.randn(3, 8).bfloat16(), 2, "sigmoid", True, 2.5, torch.randn(8), True)
    torch.library.opcheck(op, arguments)
    torch.library.opcheck(op, (*arguments, 4, 2, 2))


def test_compiles_without_graph_breaks() -> None:
    logits = torch.randn(3, 8)

    def step(logits: Tensor) -> tuple[Tensor, Tensor]:
        return route_experts(logits, top_k=2, normalise=True)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for got, expected in zip(compiled(logits), step(logits), strict=True):
        assert torch.equal(got, expected)
