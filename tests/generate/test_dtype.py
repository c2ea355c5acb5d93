"""Low precision: teacher-forced logits are as good as Hugging Face's own."""

from __future__ import annotations

import copy

import pytest
import torch
from models import (
    FAMILIES,
    greedy,
    padded_prompts,
    prompt,
    tiny,
    tiny_family,
    without_choice,
)
from torch import Tensor
from transformers import LlamaConfig

import torch_paged

NUM_TOKENS = 32


def forced_logits(model, ids: Tensor, mask: Tensor, tape: Tensor) -> Tensor:
    """Return logits [steps, B, V] while `tape` [B, steps] dictates the tokens."""
    width = ids.shape[1]

    def next_token(row: int, so_far: Tensor) -> list[int]:
        return [int(tape[row, len(so_far) - width])]

    output = greedy(
        model,
        ids,
        tape.shape[1],
        attention_mask=mask,
        prefix_allowed_tokens_fn=next_token,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert torch.equal(output.sequences[:, width:].cpu(), tape)
    return torch.stack(output.logits).double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_low_precision(family, dtype, device, accelerate) -> None:
    low = tiny_family(family, device, **without_choice(family)).to(dtype)
    exact = copy.deepcopy(low).float()
    ids, mask = padded_prompts((5, 16, 33), device)
    # The largest error is a matter of chance: the more tokens, the less.
    seeds = range(1, 13) if device.type == "cuda" else range(1, 4)
    tapes = torch.cat([prompt(NUM_TOKENS, seed) for seed in seeds]).view(-1, 3, NUM_TOKENS)
    if device.type == "cpu":
        # One call instead of several; on a GPU more rows would take other kernels.
        ids, mask = ids.repeat(len(tapes), 1), mask.repeat(len(tapes), 1)
        tapes = tapes.flatten(0, 1)[None]

    def answer(model) -> Tensor:
        return torch.cat([forced_logits(model, ids, mask, tape) for tape in tapes])

    want = answer(exact)
    theirs = (answer(copy.deepcopy(low)) - want).abs()
    accelerate(low)
    ours = (answer(low) - want).abs()
    assert torch_paged.explain(low).last_call.path == "fused"
    assert float(theirs.max()) > 0
    assert float(ours.square().mean().sqrt()) <= 1.25 * float(theirs.square().mean().sqrt())
    assert float(ours.max()) <= 2 * float(theirs.max())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logits_of_float32(family, device, accelerate) -> None:
    model = tiny_family(family, device)
    exact = copy.deepcopy(model).double()
    # One row: Hugging Face's float64 attention gives NaN where a row has padding.
    ids, mask = padded_prompts((33,), device)
    tape = prompt(NUM_TOKENS, 1)
    want = forced_logits(exact, ids, mask, tape)
    theirs = (forced_logits(copy.deepcopy(model), ids, mask, tape) - want).abs()
    accelerate(model)
    ours = (forced_logits(model, ids, mask, tape) - want).abs()
    assert float(ours.max()) <= 4 * float(theirs.max()) < 1e-2


def test_float32_head_on_a_low_precision_body(device, accelerate) -> None:
    model = tiny(LlamaConfig, 7, device).to(torch.bfloat16)
    model.lm_head.float()
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    exact = copy.deepcopy(model).float()
    ids, mask = padded_prompts((5, 20), device)
    tape = torch.cat([prompt(10, seed) for seed in (1, 2)])
    accelerate(model, on_unsupported="fallback")
    for sign in (1, -1):
        with torch.no_grad():
            model.lm_head.weight.mul_(sign)
            exact.lm_head.weight.mul_(sign)
        want = forced_logits(exact, ids, mask, tape)
        theirs = (forced_logits(copy.deepcopy(model), ids, mask, tape) - want).abs()
        ours = (forced_logits(model, ids, mask, tape) - want).abs()
        assert float(ours.max()) <= 2 * float(theirs.max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_dtypes_run(dtype, device, accelerate) -> None:
    model = tiny(LlamaConfig, 8, device).to(dtype)
    ids = prompt(17, 17, device=device)
    expected = greedy(copy.deepcopy(model), ids, 8)
    accelerate(model, on_unsupported="fallback")
    got = greedy(model, ids, 8)
    assert got.shape == expected.shape
    if dtype is torch.float64:
        assert torch.equal(got, expected)


def test_float64_raises_or_runs_when_asked(device) -> None:
    model = tiny(LlamaConfig, 8, device).double()
    ids = prompt(17, 17, device=device)
    expected = greedy(copy.deepcopy(model), ids, 8)
    try:
        torch_paged.accelerate(model, on_unsupported="raise")
        got = greedy(model, ids, 8)
    except NotImplementedError as error:
        assert "float64" in str(error)
    else:
        assert torch.equal(got, expected)
