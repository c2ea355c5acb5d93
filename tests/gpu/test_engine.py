"""The engine on the GPU: captured steps, no syncs while nothing changes, rows that come and go."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torch_paged
from torch_paged.engine import host_blocks
from torch_paged.engine.host_swap import HostSwap

VOCAB = 4099


@pytest.fixture(scope="module")
def reference() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).to("cuda").eval()
    model.set_attn_implementation("eager")
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def model(reference: Any) -> Any:
    return copy.deepcopy(reference)


def ids_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def alone(model: Any, ids: list[int], num_tokens: int, **kwargs: Any) -> list[int]:
    tensor = torch.tensor([ids], device="cuda")
    out = model.generate(
        tensor,
        attention_mask=torch.ones_like(tensor),
        max_new_tokens=num_tokens,
        do_sample=False,
        **kwargs,
    )
    return out[0, len(ids) :].tolist()


LENGTHS = (5, 16, 17, 48, 130, 300)


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("budget", [96, 4096])
def test_float32_tokens_are_generates(
    model: Any, reference: Any, budget: int, cuda_graphs: bool
) -> None:
    """Waves of requests, so that buckets change and every graph is met more than once."""
    with torch_paged.Engine(
        model,
        on_unsupported="raise",
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        cuda_graphs=cuda_graphs,
    ) as engine:
        for wave in range(2):
            for n in LENGTHS:
                engine.add_request(ids_of(n, n + wave), max_new_tokens=20 + n % 7, request_id=n)
                engine.step()
            outputs = engine.run()
            for n in LENGTHS:
                expected = alone(reference, ids_of(n, n + wave), 20 + n % 7)
                tokens = list(outputs[n].token_ids) if n in outputs else None
                assert tokens == expected, (wave, n)
        engine.check_integrity()
        if cuda_graphs:
            assert torch_paged.stats(model).graphs > 0


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_rows_beside_prompts_say_what_they_say_apart(model: Any, cuda_graphs: bool) -> None:
    """Prompts of many sizes arrive one by one, beside up to 40 rows that decode."""

    def run(mixes: bool) -> tuple[list[dict[Any, list[int]]], set[Any]]:
        said = []
        with torch_paged.Engine(
            model, on_unsupported="raise", max_num_seqs=40, cuda_graphs=cuda_graphs
        ) as engine:
            engine._service.engine.mixes = mixes
            for _ in range(3):
                ended: dict[Any, Any] = {}
                for i in range(60):
                    engine.add_request(
                        ids_of(3 + 17 * (i % 19), i),
                        max_new_tokens=12 + i,
                        request_id=i,
                        do_sample=i % 3 == 0,
                        seed=i,
                        repetition_penalty=1.3 if i % 5 == 0 else 1.0,
                    )
                    ended |= {out.request_id: out for out in engine.step() if out.finished}
                ended |= engine.run()
                said.append({i: list(out.token_ids) for i, out in ended.items()})
            engine.check_integrity()
            graphs = engine._service.engine.core.graphs
            return said, set() if graphs is None else set(graphs.keys())

    mixed, keys = run(True)
    apart, _ = run(False)
    assert all(set(wave) == set(range(60)) for wave in apart)
    assert mixed == apart
    # Of tokens of prompts, and of rows that decode beside them.
    sizes = {key[2:4] for key in keys if key[0] == "serve prefill"}
    assert not cuda_graphs or len([size for size in sizes if size[1]]) > 10


def test_every_kind_of_request_at_once(model: Any, reference: Any) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.4},
        {"min_new_tokens": 9, "eos_token_id": list(range(2000))},
        {"suppress_tokens": list(range(0, VOCAB, 2))},
    ]
    with torch_paged.Engine(model, on_unsupported="raise", max_num_seqs=16) as engine:
        drawn = []
        for _ in range(2):
            for i, kwargs in enumerate(kinds):
                engine.add_request(
                    ids_of(20, i), max_new_tokens=24, request_id=i, logprobs=i % 2 == 0, **kwargs
                )
            engine.add_request(
                ids_of(20, 9),
                max_new_tokens=24,
                request_id="drawn",
                do_sample=True,
                top_p=0.9,
                seed=3,
            )
            outputs = engine.run()
            drawn.append(list(outputs["drawn"].token_ids))
        for i, kwargs in enumerate(kinds):
            assert outputs[i].token_ids == alone(reference, ids_of(20, i), 24, **kwargs)
        assert drawn[0] == drawn[1]
        ids = ids_of(20, 0) + list(outputs[0].token_ids)
        with torch.no_grad():
            logits = reference(torch.tensor([ids], device="cuda")).logits[0, 19:-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[20:], device="cuda")[:, None])
        got = torch.tensor(outputs[0].logprobs[:], device="cuda")
        torch.testing.assert_close(got, expected[:, 0], atol=1e-3, rtol=0)


@pytest.mark.parametrize("asked", [{}, {"logprobs": 5}], ids=str)
def test_a_steady_step_does_not_wait_for_the_device(model: Any, asked: dict[str, Any]) -> None:
    """Several steps queue behind a kernel that spins."""
    with torch_paged.Engine(model, on_unsupported="raise", max_num_seqs=8, lag=16) as engine:
        for n in (5, 16, 17):
            engine.add_request(ids_of(n, n), max_new_tokens=200, **asked)
        for _ in range(40):
            engine.step()
        torch.cuda.synchronize()
        advance = engine._service.advance
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(int(2e9))
            started = time.perf_counter()
            for _ in range(8):
                advance(tokens=False)
            assert time.perf_counter() - started < 0.3
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(out.error is None for out in engine.run().values())


@pytest.mark.parametrize("asked", [{}, {"logprobs": 5, "prompt_logprobs": 2}], ids=str)
def test_admissions_do_not_wait_for_the_device(model: Any, asked: dict[str, Any]) -> None:
    penalty = {"repetition_penalty": 1.2, "seed": 1, **asked}
    with torch_paged.Engine(model, on_unsupported="raise", max_num_seqs=8, lag=16) as engine:
        # Three times, so that all graphs are there: from the second on, prefixes are found.
        for _ in range(3):
            engine.add_request(ids_of(40, 1), max_new_tokens=100)
            for _ in range(3):
                engine.step()
            engine.add_request(ids_of(40, 2), max_new_tokens=4, **penalty)
            engine.run()
        engine.add_request(ids_of(40, 1), max_new_tokens=100)
        for _ in range(20):
            engine.step()
        engine.add_request(ids_of(40, 2), max_new_tokens=4, **penalty)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(int(2e9))
            started = time.perf_counter()
            for _ in range(4):
                engine._service.advance(tokens=False)
            assert time.perf_counter() - started < 0.4
        finally:
            torch.cuda.set_sync_debug_mode("default")
        # A wait raises, and what raises in a prefill ends its request.
        outputs = engine.run()
        assert len(outputs) == 2 and all(out.error is None for out in outputs.values())


def test_preemption_and_generate_in_between(model: Any, reference: Any) -> None:
    # 32 blocks of 16 tokens, of which the requests need 53.
    with torch_paged.Engine(
        model, on_unsupported="raise", max_num_seqs=6, kv_cache_memory=2 << 20
    ) as engine:
        for n in LENGTHS[:-1]:
            engine.add_request(ids_of(n, n), max_new_tokens=120, request_id=n)
        outputs = {}
        for step in range(60):
            outputs.update({out.request_id: out for out in engine.step() if out.finished})
            if step % 20 == 7:
                assert alone(model, ids_of(9, step), 4) == alone(reference, ids_of(9, step), 4)
            engine.check_integrity()
        outputs.update(engine.run())
        assert engine.num_preemptions > 0
        for n in LENGTHS[:-1]:
            assert outputs[n].token_ids == alone(reference, ids_of(n, n), 120), n


def test_preempted_rows_wait_in_pinned_memory_and_no_copy_is_waited_for(
    model: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_blocks, swapped = HostSwap.copy, []

    def without_syncs(swap: HostSwap, scheduled: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            copy_blocks(swap, scheduled)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        swapped.extend(len(c.host_blocks) for c in scheduled.swap_ins)
        assert all(piece.is_pinned() for piece in swap._blocks._pieces)

    monkeypatch.setattr(HostSwap, "copy", without_syncs)
    # Too few blocks, as above, and more than one batch of copies for each row.
    monkeypatch.setattr(host_blocks, "_PIECE_BYTES", 1 << 18)
    with torch_paged.Engine(
        model,
        on_unsupported="raise",
        max_num_seqs=6,
        kv_cache_memory=2 << 20,
        cpu_offload_space=0.25,
        enable_prefix_caching=False,
    ) as engine:
        for n in LENGTHS[:-1]:
            engine.add_request(ids_of(n, n), max_new_tokens=120, request_id=n)
        outputs = engine.run()
        for n in LENGTHS[:-1]:
            assert outputs[n].token_ids == alone(reference, ids_of(n, n), 120), n
        stats = torch_paged.stats(model)
        assert stats.swaps == stats.preemptions > 0 and sum(swapped) > 0 and stats.graphs > 0
        torch_paged.release(model)
        assert stats.host_bytes > 0 == torch_paged.stats(model).host_bytes


def test_stale_prefixes_are_noticed(model: Any) -> None:
    with torch_paged.Engine(model, on_unsupported="raise") as engine:
        ids = ids_of(100, 1)
        for _ in range(3):
            engine.add_request(ids, max_new_tokens=8, request_id=0)
            before = list(engine.run()[0].token_ids)
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.data.mul_(1.5)
        expected = alone(copy.deepcopy(model), ids, 8)
        engine.add_request(ids, max_new_tokens=8, request_id=0)
        assert list(engine.run()[0].token_ids) == expected != before


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_log_probabilities_are_the_models(
    model: Any, reference: Any, mode: str, cuda_graphs: bool
) -> None:
    """Several waves, so that steps with and without likely tokens are captured and replayed."""
    drawn = {"do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.9}
    with torch_paged.Engine(
        model,
        on_unsupported="raise",
        max_num_seqs=8,
        max_num_batched_tokens=96,
        cuda_graphs=cuda_graphs,
        logprobs_mode=mode,
    ) as engine:
        outputs = {}
        for wave in range(3):
            for i, count in enumerate((True, 1, 5, 20, False)):
                engine.add_request(
                    ids_of(20 + 40 * i, i + 9 * wave),
                    max_new_tokens=16,
                    request_id=(wave, i),
                    logprobs=count,
                    prompt_logprobs=count if wave else None,
                    seed=i,
                    **(drawn if i == 3 else {}),
                )
            outputs |= engine.run()
        engine.check_integrity()
    for (wave, i), out in outputs.items():
        count, start = (0, 1, 5, 20, 0)[i], len(out.prompt_ids)
        ids = torch.tensor([[*out.prompt_ids, *out.token_ids]], device="cuda")
        with torch.no_grad():
            logits = reference(ids).logits[0, :-1].float()
        raw = logits.log_softmax(-1)
        rows = raw[start - 1 :]
        if mode == "processed_logprobs" and i == 3:
            scores = (logits[start - 1 :] / 0.8).clone()
            scores[scores < scores.topk(30).values[:, -1:]] = -torch.inf
            ranked, order = scores.softmax(-1).sort(descending=True)
            cut = torch.zeros_like(scores, dtype=torch.bool)
            cut.scatter_(1, order, ranked.cumsum(-1) - ranked >= 0.9)
            rows = scores.masked_fill(cut, -torch.inf).log_softmax(-1)
        if i == 4:
            assert out.logprobs is None and out.top_logprobs is None
        else:
            _check_logprobs(out.logprobs, out.top_logprobs, rows, ids[0, start:], count)
        if wave and i != 4:
            assert out.prompt_logprobs[0] is None
            top = out.prompt_top_logprobs
            _check_logprobs(
                out.prompt_logprobs[1:],
                None if top is None else top[1:],
                raw[: start - 1],
                ids[0, 1:start],
                count,
            )


def _check_logprobs(
    values: Any, tops: Any, expected: torch.Tensor, tokens: torch.Tensor, count: int
) -> None:
    chosen = expected.gather(1, tokens[:, None])[:, 0]
    got = torch.tensor(values[:], device="cuda")
    torch.testing.assert_close(got, chosen, atol=1e-3, rtol=0)
    assert (tops is None) == (count == 0)
    for top, row in zip(tops or (), expected, strict=True) if count else ():
        best = row.topk(count).values
        best = best[best.isfinite()].tolist()
        assert [value for _, value in top] == pytest.approx(best, abs=1e-3)
        for token, value in top:
            assert value == pytest.approx(row[token].item(), abs=1e-3)
