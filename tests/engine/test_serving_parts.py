"""The parts under the serving loop, each for itself."""

from __future__ import annotations

import random

import pytest
import torch

from torch_paged.decoder.inputs import put_decoding
from torch_paged.decoder.state import RowStart, SlotState, report_bytes, report_parts
from torch_paged.engine.packing import pack_chunks
from torch_paged.engine.params import SamplingParams
from torch_paged.engine.request import Request
from torch_paged.engine.sampling_state import SamplingStart, SamplingState
from torch_paged.engine.slot_pool import SlotPool
from torch_paged.engine.step import PrefillChunk
from torch_paged.engine.tail import ServingTail
from torch_paged.engine.token_log import TokenLog
from torch_paged.errors import TorchPagedError

CPU = torch.device("cpu")


def test_lowest_free_slot_is_taken_first() -> None:
    pool = SlotPool(3)
    assert [pool.take(), pool.take()] == [0, 1]
    pool.give_back(0)
    pool.grow(5)
    pool.grow(2)
    assert (pool.num_slots, pool.num_free) == (5, 4)
    assert [pool.take() for _ in range(4)] == [0, 2, 3, 4]


@pytest.mark.parametrize("held", [[0, 0], [3], [7], [-1]], ids=str)
def test_slots_held_twice_or_free_or_unknown_are_found(held: list[int]) -> None:
    pool = SlotPool(4)
    pool.take()
    pool.check_integrity([0])
    with pytest.raises(TorchPagedError, match="slots"):
        pool.check_integrity(held)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 7, 8, 100])
def test_parts_of_a_report_do_not_overlap(num_slots: int) -> None:
    size = report_bytes(num_slots)
    assert size % 8 == 0
    reports = torch.zeros((3, size), dtype=torch.uint8)
    parts = report_parts(reports)
    assert [p.shape for p in parts] == [(3, num_slots)] * 4
    for value, part in enumerate(parts, 1):
        part.copy_(torch.full((3, num_slots), value).to(part.dtype))
    tokens, logprobs, finished, failed = report_parts(reports.clone())
    assert (tokens == 1).all() and (logprobs == 2).all() and finished.all() and failed.all()


def test_a_larger_state_has_the_rows_of_the_smaller_one() -> None:
    small = SlotState(3, 4, 2, CPU, ring=16, num_tables=2)
    small.start_rows(
        [RowStart(1, 9, 7, (5, 6), -1, num_generated=3), RowStart(2, 4, 2, (), 0)],
        torch.tensor([8, 3]),
    )
    small.write_blocks([(1, 0, (11, 12), 0), (2, 1, (13,), 0), (0, 0, (), 0), (2, 0, (14,), 1)])
    small.advance(torch.tensor([5, 9]), torch.tensor([1, 2], dtype=torch.int32))
    large = SlotState(5, 9, 2, CPU, num_eos_ids=12, ring=16, num_tables=2)
    large.take_rows(small)
    for name in ("last_token", "positions", "context_lens", "num_generated", "finished"):
        assert torch.equal(getattr(large, name)[:3], getattr(small, name)), name
    assert small.block_tables[1].tolist() == [[0] * 4, [0] * 4, [14, 0, 0, 0]]
    assert torch.equal(large.block_tables[:, :3, :4], small.block_tables)
    assert torch.equal(large.eos_ids[:3, :8], small.eos_ids) and (large.eos_ids[:, 8:] == -1).all()
    assert torch.equal(large.output[:, :3], small.output)
    assert large.num_generated[1] == 4 and large.output[3, 1] == 5 and large.finished[1]
    assert large.nbytes > small.nbytes


def test_log_reads_rows_across_its_end() -> None:
    state = SlotState(4, 1, 1, CPU)
    log = TokenLog(state, num_steps=8, depth=2)
    for step in range(21):
        state.last_token.copy_(torch.arange(4) + 10 * step)
        state.token_logprobs.copy_(-torch.arange(4.0) - step)
        state.finished.copy_(torch.tensor([False, step == 20, False, False]))
        state.failed.copy_(torch.tensor([False, False, step == 19, False]))
        log.post(step)
        log.wait(step)
    assert log.tokens(2, 13, 20) == [10 * step + 2 for step in range(13, 21)]
    assert log.tokens(0, 16, 16) == [160]
    for first, last in ((13, 20), (16, 16), (13, 15), (16, 20), (14, 18)):
        slots = [2, 0]
        expected = [[10 * step + slot for step in range(first, last + 1)] for slot in slots]
        assert log.columns(slots, first, last) == expected
    assert log.logprobs(3, 14, 17) == [-17.0, -18.0, -19.0, -20.0]
    assert log.all_tokens(20) == [200, 201, 202, 203]
    assert log.any_ended(20, torch.tensor([3, 1])) == [1]
    assert log.any_ended(19, torch.tensor([2, 0, 1])) == [0]
    assert log.any_ended(18, torch.tensor([2, 0, 1])) == []
    assert log.has_failed(19, 2) and not log.has_failed(20, 1) and log.has_ended(20, 1)


def request_of(slot: int, prompt: list[int], output: list[int], blocks: list[int]) -> Request:
    request = Request(slot, prompt, 9, output_ids=output)
    request.slot, request.blocks[0].ids = slot, blocks
    return request


def test_chunks_are_packed_with_their_tokens_and_places() -> None:
    one = request_of(3, [10, 11, 12, 13, 14], [20, 21], [7, 5])
    two = request_of(0, [30], [], [2])
    three = request_of(6, list(range(40, 50)), [], [9, 1, 4])
    packed = pack_chunks(
        [
            PrefillChunk(one, 3, 4, True),
            PrefillChunk(two, 0, 1, True),
            PrefillChunk(three, 4, 3, False),
        ],
        4,
        1,
    )
    inputs = packed.on_device(CPU).inputs
    assert inputs.ids is not None and inputs.positions is not None
    assert inputs.ids.tolist() == [13, 14, 20, 21, 30, 44, 45, 46]
    assert inputs.positions.tolist() == [3, 4, 5, 6, 0, 4, 5, 6]
    (mapping,) = inputs.slot_mappings
    assert mapping.tolist() == [31, 20, 21, 22, 8, 4, 5, 6] and inputs.cu_seqlens is not None
    assert inputs.cu_seqlens.tolist() == [0, 4, 5, 8]
    assert inputs.last_index is not None and inputs.last_index.tolist() == [3, 4, 7]
    assert inputs.slots.tolist() == [3, 0, 6] and inputs.max_query_len == 4
    assert packed.piece_slots == [3, 0, 6] and packed.num_tokens == 8
    assert packed.ends.tolist() == [3, 0, -1]


def test_decoding_rows_come_in_front_of_the_chunks() -> None:
    one = request_of(3, [10, 11, 12, 13, 14], [], [7, 5])
    two = request_of(0, [30], [], [2])
    chunks = [PrefillChunk(one, 2, 2, False), PrefillChunk(two, 0, 1, True)]
    packed = pack_chunks(chunks, 4, 1, decoding=[6, 1, 4])
    inputs = packed.on_device(CPU).inputs
    assert inputs.decoding is not None and inputs.decoding.tolist() == [6, 1, 4]
    assert inputs.decoding.dtype == torch.int32
    state = SlotState(8, 1, 1, CPU)
    state.last_token.copy_(torch.arange(8) + 100)
    state.positions.copy_(torch.arange(8) + 50)
    put_decoding(state, inputs)
    assert inputs.ids is not None and inputs.ids.tolist() == [106, 101, 104, 12, 13, 30]
    assert inputs.positions is not None and inputs.positions.tolist() == [56, 51, 54, 2, 3, 0]
    assert inputs.slots.tolist() == [-1, 3, 0] and inputs.max_query_len == 2
    assert inputs.cu_seqlens is not None and inputs.cu_seqlens.tolist() == [0, 3, 5, 6]
    assert inputs.last_index is not None and inputs.last_index.tolist() == [0, 1, 2, 4, 5]
    (mapping,) = inputs.slot_mappings
    assert mapping.tolist() == [-1, -1, -1, 30, 31, 8]
    assert packed.ends.tolist() == [6, 1, 4, -1, 0]
    assert packed.piece_slots == [3, 0] and packed.num_tokens == 3


def test_padding_rows_put_valid_tokens() -> None:
    state = SlotState(2, 1, 1, CPU)
    state.last_token.copy_(torch.tensor([8, 9]))
    ids, positions = torch.full((3,), -5), torch.full((3,), -5, dtype=torch.int32)
    state.put_last_tokens(torch.tensor([1, -1], dtype=torch.int32), ids, positions)
    assert ids.tolist() == [9, 8, -5] and positions.tolist() == [0, 0, -5]


def test_a_chunk_whose_tokens_are_not_known_is_refused() -> None:
    request = request_of(0, [1, 2], [3], [0, 1])
    with pytest.raises(AssertionError, match="must be known"):
        pack_chunks([PrefillChunk(request, 0, 5, True)], 4, 1)


def sampling_of(vocab: int, starts: list[SamplingStart], num_slots: int = 6) -> SamplingState:
    sampling = SamplingState(num_slots, vocab, CPU)
    sampling.start_rows(starts)
    return sampling


def test_parameters_arrive_exactly() -> None:
    params = SamplingParams(
        9,
        min_new_tokens=4,
        temperature=0.1,
        top_k=7,
        top_p=0.3,
        min_p=1e-7,
        seed=(1 << 64) - 3,
        repetition_penalty=1.3,
        suppressed=(0, 63, 64),
    )
    sampling = sampling_of(
        70, [SamplingStart(4, params, [1, 2, 65, 1]), SamplingStart(2, SamplingParams(3), ())]
    )
    grown = sampling.grown(11)
    for state in (sampling, grown):
        assert state.temperature[4] == 0.1 and state.top_p[4] == 0.3 and state.min_p[4] == 1e-7
        assert state.top_k[4] == 7 and state.min_new_tokens[4] == 4
        assert state.seeds[4] == -3 and state.repetition_penalty[4] == 1.3
        bits = [i for i in range(96) if state.seen[4, i // 32] >> (i % 32) & 1]
        assert bits == [1, 2, 65]
        bits = [i for i in range(96) if state.suppressed[4, i // 32] >> (i % 32) & 1]
        assert bits == [0, 63, 64]
        assert not state.seen[2].any() and state.temperature[2] == 0
    sampling.start_rows([SamplingStart(4, SamplingParams(3), [5])])
    assert not sampling.seen[4].any() and not sampling.suppressed[4].any()
    assert sampling.repetition_penalty[4] == 1.0 and sampling.seeds[4] == 0


@pytest.mark.parametrize("kind", ["greedy", "sample", "edits", "all"])
def test_a_row_of_the_tail_does_not_depend_on_the_others(kind: str) -> None:
    vocab, draw = 40, random.Random(0)
    edits, samples = kind in ("edits", "all"), kind in ("sample", "all")
    starts, rows = [], []
    for slot in range(6):
        params = SamplingParams(
            9,
            eos_ids=(3,),
            min_new_tokens=2 if edits else 0,
            temperature=draw.choice([0.0, 0.7, 2.0]) if samples else 0.0,
            seed=slot,
            repetition_penalty=1.5 if edits else 1.0,
        )
        starts.append(SamplingStart(slot, params, [slot, 7]))
        rows.append(RowStart(slot, 5, 9, (3,), -1))
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1))
    logits[2, 11] = float("nan")

    def run(slots: list[int]) -> dict[int, tuple[int, float, bool]]:
        state = SlotState(6, 1, 1, CPU)
        state.start_rows(rows, torch.full((6,), 4))
        tail = ServingTail(
            state, sampling_of(vocab, starts), edits=edits, samples=samples, logprobs=True
        )
        given = [max(slot, 0) for slot in slots]
        tail(logits[given].clone(), torch.tensor(slots, dtype=torch.int32))
        assert (state.num_generated == torch.tensor([s in slots for s in range(6)])).all()
        return {
            s: (int(state.last_token[s]), float(state.token_logprobs[s]), bool(state.failed[s]))
            for s in slots
            if s >= 0
        }

    alone = {slot: run([slot])[slot] for slot in range(6)}
    together = run([5, -1, 0, 3, 1, -1, 2, 4])
    assert all(together[s][0] == alone[s][0] for s in range(6))
    assert [s for s in range(6) if alone[s][2]] == [2] == [s for s in range(6) if together[s][2]]
    for s in (0, 1, 3, 4, 5):
        expected = float(logits[s].log_softmax(-1)[alone[s][0]])
        assert alone[s][1] == pytest.approx(expected, abs=1e-5) == together[s][1]
