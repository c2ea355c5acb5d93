"""A row that is extended by several tokens at once and set back: logits are those of a forward."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig

import torch_paged
from torch_paged.engine.batch import PackedPrompts
from torch_paged.engine.row_run import RowRun
from torch_paged.engine.sampler import GreedySampler
from torch_paged.errors import OutOfBlocks
from torch_paged.generate.registry import find_session

sys.path += [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1])]

from models import prompt, tiny  # noqa: E402
from replaying_graphs import ReplayingGraphs, capture  # noqa: E402


@pytest.fixture(params=["full", "windows"])
def model(request):
    if request.param == "full":
        model = tiny(LlamaConfig, 5)
    else:
        model = tiny(MistralConfig, 5, sliding_window=17)
    torch_paged.accelerate(model, block_size=8, on_unsupported="raise")
    yield model
    torch_paged.restore(model)


def core_of(model: Any) -> Any:
    session = find_session(model)
    assert session is not None and session.decide_tier() == "fused"
    return session.core


def prompts_of(ids: torch.Tensor, first_position: int = 0) -> PackedPrompts:
    count = ids.shape[0]
    positions = torch.arange(first_position, first_position + count, dtype=torch.int32)
    return PackedPrompts((count,), ids, None, positions, positions[-1:])


def forward(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return logits [num_tokens, vocab_size] of the model's own forward."""
    return model(ids[None]).logits[0]


def replayed(core: Any, refused: tuple[str, ...] = ()) -> ReplayingGraphs:
    """Let the steps of a core be captured by graphs that replay their code."""
    core.prepare(1, 300, 1)
    core.make_room(1)
    graphs = ReplayingGraphs(refused)
    capture(core, graphs, (1, 2, 4))
    return graphs


@pytest.mark.parametrize("how", ["eager", "captured", "refused"])
def test_extensions_of_all_sizes(how, model) -> None:
    core = core_of(model)
    graphs = None
    if how != "eager":
        graphs = replayed(core, ("a step of several tokens",) if how == "refused" else ())
    sizes = [1, 2, 3, 4, 5, 8, 9, 1, 16, 17, 64, 70, 1]
    ids = prompt(11 + sum(sizes), 3)[0]
    with torch.no_grad():
        expected = forward(model, ids)
        with RowRun(core, prompts_of(ids[:11])) as run:
            torch.testing.assert_close(run.prefill(), expected[10:11], rtol=1e-4, atol=1e-4)
            start = 11
            for size in sizes:
                logits = run.extend(ids[start : start + size])
                wanted = expected[start : start + size]
                torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
                start += size
                assert run.num_tokens == start
    if graphs is not None:
        keys = {key for key in graphs.code if key[0] == "extend"}
        buckets = {1, 2, 4, 8, 16, 32, 64} if how == "captured" else set()
        assert keys == {("extend", 0, bucket) for bucket in buckets}
    assert core.num_blocks == core.allocator.num_free


@pytest.mark.parametrize("captured", [False, True])
def test_rejected_tokens_leave_no_trace(captured, model) -> None:
    core = core_of(model)
    if captured:
        replayed(core)
    ids, wrong = prompt(90, 4)[0], prompt(90, 5)[0]
    with torch.no_grad():
        expected = forward(model, ids)
        with RowRun(core, prompts_of(ids[:30])) as run:
            run.prefill()
            at, step = 30, 0
            while at < 84:
                good = (1, 3, 2, 6)[step % 4]
                extended = torch.cat(
                    [ids[at : at + good], wrong[at + good : at + good + step % 5]]
                )
                logits = run.extend(extended)[:good]
                torch.testing.assert_close(logits, expected[at : at + good], rtol=1e-4, atol=1e-4)
                at, step = at + good, step + 1
                run.rewind(at)
    assert core.num_blocks == core.allocator.num_free


@pytest.mark.parametrize("captured", [False, True])
def test_whole_steps_behind_an_extension(captured, model) -> None:
    core = core_of(model)
    if captured:
        replayed(core)
    ids = prompt(40, 6)[0]
    with torch.no_grad():
        plain = model.generate(ids[None], max_new_tokens=9, do_sample=False)[0, 40:]
        for split in (1, 4, 13):
            with RowRun(core, prompts_of(ids[: 40 - split])) as run:
                run.prefill()
                run.choose(run.extend(ids[40 - split :])[-1:], GreedySampler())
                for _ in range(8):
                    run.launch(GreedySampler())
                (slot,) = run.rows.slots
                assert torch.equal(run.state.output[:9, slot], plain)
                assert run.num_tokens == 48


def test_positions_go_on_where_those_of_the_prompt_end(model) -> None:
    core, ids = core_of(model), prompt(20, 7)[0]
    positions = torch.arange(100, 120)
    with torch.no_grad():
        expected = model(ids[None], position_ids=positions[None]).logits[0]
        with RowRun(core, prompts_of(ids[:12], 100)) as run:
            run.prefill()
            torch.testing.assert_close(run.extend(ids[12:]), expected[12:], rtol=1e-4, atol=1e-4)


def test_last_blocks_are_used_before_it_fails(model) -> None:
    core, ids = core_of(model), prompt(200, 8)[0]
    core.prepare(1, 16, 1)
    core.pool.max_bytes = 8 * core.pool.block_bytes * core.layout.num_tables
    core.make_room_beyond = core.make_room
    with torch.no_grad(), RowRun(core, prompts_of(ids[:12])) as run:
        run.prefill()

        def fill() -> None:
            while run.num_tokens < 180:
                run.rewind(run.num_tokens)
                run.extend(ids[run.num_tokens : run.num_tokens + 4])

        if any(core.layout.windows):
            fill()  # what falls behind the windows makes room
        else:
            with pytest.raises(OutOfBlocks, match="no room for a row of 68 tokens"):
                fill()
            assert run.num_tokens == 64
    assert core.num_blocks == core.allocator.num_free
