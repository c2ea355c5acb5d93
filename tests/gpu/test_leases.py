"""Leased caches on the GPU: no wait for the device, other streams, captures, memory."""

import gc
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torch_paged
from torch_paged.errors import TorchPagedError
from torch_paged.generate import returned_cache, sample
from torch_paged.patches import lease_seams, seams

VOCAB = 1000


def make_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )
    with torch.device("cuda"):
        made = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    made.generation_config.pad_token_id = 0
    made.generation_config.eos_token_id = None
    return torch_paged.accelerate(made, on_unsupported="raise")


@pytest.fixture
def model():
    return make_model()


def used_bytes():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def turn(model, ids, mask=None, cache=None, count=20):
    name = next(n for n in seams.CACHE_NAMES if n in seams.forward_arguments(model))
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=count,
        do_sample=False,
        return_dict_in_generate=True,
        **({} if cache is None else {name: cache}),
    )


def cache_of(output):
    return next(output[name] for name in seams.CACHE_NAMES if output.get(name) is not None)


def prompts(rows=3, length=70):
    ids = torch.randint(3, VOCAB, (rows, length), device="cuda")
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 9 * row] = 0
    return ids, mask


def two_turns(model, ids, mask, more):
    first = turn(model, ids, mask)
    following = torch.cat([first.sequences, more], 1)
    seen = torch.cat([mask, mask.new_ones(len(ids), 20 + more.shape[1])], 1)
    return turn(model, following, seen, cache_of(first))


def copied():
    return mock.patch.object(returned_cache, "_can_lease", lambda *args: False)


def assert_equal(got, expected):
    assert len(got.layers) == len(expected.layers) == 4
    for a, b in zip(got.layers, expected.layers, strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


def test_turns_are_those_of_copied_caches_bit_for_bit(model):
    ids, mask = prompts()
    more = torch.randint(3, VOCAB, (3, 11), device="cuda")
    for _ in range(3):  # launched one by one, captured, replayed
        with copied():
            expected = two_turns(model, ids, mask, more)
        got = two_turns(model, ids, mask, more)
        assert all(map(lease_seams.is_lent, cache_of(got).layers))
        assert torch.equal(got.sequences, expected.sequences)
        assert_equal(cache_of(got), cache_of(expected))


def test_handing_over_never_syncs(model, monkeypatch):
    ids, mask = prompts()
    more = torch.randint(3, VOCAB, (3, 11), device="cuda")
    two_turns(model, ids, mask, more)
    hand, calls = sample.hand_to_cache, []

    def watched(*args):
        calls.append(args)
        torch.cuda.set_sync_debug_mode("error")
        try:
            hand(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(sample, "hand_to_cache", watched)
    two_turns(model, ids, mask, more)
    assert len(calls) == 2


@pytest.mark.parametrize("kv_cache_memory", [None, 1 << 20], ids=["mapped", "plain tensors"])
def test_another_stream_looks_while_the_device_is_busy(model, kv_cache_memory):
    if kv_cache_memory is not None:
        torch_paged.accelerate(model, kv_cache_memory=8 * kv_cache_memory)
    ids, mask = prompts()
    with copied():
        expected = cache_of(turn(model, ids, mask))
    other = torch.cuda.Stream()
    for _ in range(4):
        cache = cache_of(turn(model, ids, mask))
        torch.cuda._sleep(20_000_000)
        with torch.cuda.stream(other):
            torch.cuda._sleep(20_000_000)
            assert cache.layers[0].keys is not None  # not waited for
        # Takes the blocks that the other stream still reads.
        turn(model, *prompts())
        torch.cuda.current_stream().wait_stream(other)
        assert_equal(cache, expected)


def test_a_capture_is_told_to_look_before(model):
    ids, mask = prompts()
    with copied():
        expected = cache_of(turn(model, ids, mask))
    cache = cache_of(turn(model, ids, mask))
    graph = torch.cuda.CUDAGraph()
    out = torch.zeros(8, device="cuda")
    with pytest.raises(TorchPagedError, match="before"), torch.cuda.graph(graph):
        out.add_(1)
        cache.layers[0].keys  # noqa: B018
    assert_equal(cache, expected)


def test_a_deleted_model_leaves_its_cache_alone():
    start = used_bytes()
    model = make_model()
    ids, mask = prompts(8, 2000)
    with copied():
        expected = cache_of(turn(model, ids, mask))
    cache = cache_of(turn(model, ids, mask))
    assert lease_seams.is_lent(cache.layers[0])
    del model
    gc.collect()
    assert not lease_seams.is_lent(cache.layers[0])
    assert_equal(cache, expected)
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert used_bytes() - start < 2 * nbytes + (64 << 20)
