"""Out of memory in generate(): one error for every catcher, and everything whole afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import greedy, prompt, reference, tiny
from transformers import LlamaConfig

import torch_paged
from torch_paged.engine.core import EngineCore
from torch_paged.errors import OutOfBlocks, TorchPagedError
from torch_paged.generate.registry import find_session

CATCHERS = [torch.cuda.OutOfMemoryError, OutOfBlocks, TorchPagedError]


def small_cache(model: Any, num_blocks: int) -> EngineCore:
    """Let the model's KV cache have so many blocks, fewer than a device maps at once."""
    session = find_session(model)
    assert session is not None and session.core is not None
    core = session.core
    core.prepare(1, 1, 1)
    core.config = core.config.replace(kv_cache_memory=1 << 20)
    core.pool.max_bytes = num_blocks * core.pool.block_bytes
    return core


# Prompts of 17 tokens: 2 blocks each, a third one from the 17th step on.
CASES = {
    "prefill": (3, {"max_new_tokens": 4}, ["3 prompts of 51 tokens", "6 blocks"]),
    "decode": (2, {"max_new_tokens": 40}, ["2 rows of up to 33 tokens"]),
    "a streamer": (1, {"max_new_tokens": 80}, ["1 row of up to 81 tokens"]),
    "samples": (
        1,
        {"max_new_tokens": 4, "do_sample": True, "num_return_sequences": 5},
        ["5 rows"],
    ),
    "beams": (1, {"max_new_tokens": 30, "num_beams": 4}, ["4 rows"]),
}


class Streamer:
    def put(self, value: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("catcher", CATCHERS, ids=lambda kind: kind.__name__)
def test_no_room_in_the_cache(case: str, catcher: type[Exception], accelerate) -> None:
    model = tiny(LlamaConfig, 8)
    rows, options, parts = CASES[case]
    ids = torch.cat([prompt(17, seed) for seed in range(17, 17 + rows)])
    expected = reference(model, ids[:1], 8).sequences
    accelerate(model)
    core = small_cache(model, 5)
    if case == "a streamer":
        options = {**options, "streamer": Streamer()}
    for _ in range(2):
        with pytest.raises(catcher) as raised:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **{"do_sample": case == "samples", "pad_token_id": 0, **options},
            )
        message = str(raised.value)
        for part in ["the KV cache has no room for", "raise kv_cache_memory", "fewer", *parts]:
            assert part in message, message
        assert core.allocator.num_live == 0
        assert core.slots.num_free == core.slots.num_slots
        assert torch.equal(greedy(model, ids[:1], 8), expected)


def test_a_batch_uses_the_last_block_before_it_fails(accelerate) -> None:
    """Blocks are asked for many steps ahead, and still for the next one alone."""
    model = tiny(LlamaConfig, 8)
    ids = prompt(17, 17)
    tokens = reference(model, ids, 20).sequences[0, 17:].tolist()
    end = next(t for i, t in enumerate(tokens) if i >= 5 and t not in tokens[:i])
    accelerate(model)
    small_cache(model, 3)
    out = greedy(model, ids, 100, eos_token_id=end)
    assert out[0, 17:].tolist() == tokens[: tokens.index(end) + 1]


@pytest.mark.parametrize("where", ["prefill", "decode"])
@pytest.mark.parametrize("catcher", CATCHERS, ids=lambda kind: kind.__name__)
def test_no_room_for_activations(
    where: str, catcher: type[Exception], device, accelerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(LlamaConfig, 8, device)
    ids = prompt(17, 17, device=device)
    expected = reference(model, ids, 8).sequences
    accelerate(model, cuda_graphs=False)
    assert torch.equal(greedy(model, ids, 8), expected)
    session = find_session(model)
    assert session is not None and session.core is not None

    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(session.core.step, where, full)
        with pytest.raises(catcher, match=r"generate\(\).*Tried to allocate 2.00 GiB.*fewer"):
            greedy(model, ids, 8)
    assert torch_paged.stats(model).kv_blocks_used == 0
    assert torch.equal(greedy(model, ids, 8), expected)
