"""rotary_cache_write against Hugging Face's norms and rotary embeddings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from torch_paged.ops.rotary_cache_write import (
    rotary_cache_write,
    rotary_cache_write_reference,
)
from torch_paged.ops.rotary_cache_write.kernel import _launch_rotary_cache_write

sys.path.append(str(Path(__file__).parent))

from rotary_cache_write_case import (  # noqa: E402
    DEVICE,
    Case,
    Inputs,
    rotate_cohere,
    rotate_glm,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOTH = pytest.mark.parametrize(
    "launch", [_launch_rotary_cache_write, rotary_cache_write_reference], ids=["kernel", "cpu"]
)

CASES = [
    # Head counts and sizes: one, odd, groups that are no power of two, more heads than one tile.
    Case(num_tokens=1, num_query_heads=1, num_kv_heads=1),
    Case(num_query_heads=9, num_kv_heads=3, head_dim=64),
    Case(num_query_heads=14, num_kv_heads=2, head_dim=40),
    Case(num_query_heads=20, num_kv_heads=5, head_dim=128),
    Case(num_query_heads=3, num_kv_heads=1, head_dim=256, value_dim=64),
    Case(head_dim=80, value_dim=96, block_size=8),
    # Around the row-by-row copy of few tokens, and several blocks of every size.
    Case(num_tokens=2, block_size=32),
    Case(num_tokens=17, block_size=8),
    # Rotary kinds, whole and partial, and none.
    Case(head_dim=64, num_freqs=8),
    Case(head_dim=80, num_freqs=16),
    Case(head_dim=24, num_freqs=5),
    Case(head_dim=40, rotary=rotate_cohere),
    Case(head_dim=16, rotary=rotate_glm, num_freqs=4),
    Case(head_dim=80, rotary=rotate_glm, num_freqs=20),
    Case(rotary=None),
    # Norms, over a head and over the whole projection, with and without rotation.
    Case(norm="qwen3", num_query_heads=6, num_kv_heads=2, head_dim=80),
    Case(norm="gemma3", head_dim=64),
    Case(norm="olmo2", num_query_heads=5, num_kv_heads=5, head_dim=24),
    Case(norm="olmoe", num_query_heads=12, num_kv_heads=3, head_dim=40, num_freqs=10),
    Case(norm="qwen3", rotary=rotate_cohere, head_dim=32),
    Case(norm="olmo2", rotary=None, num_query_heads=3, num_kv_heads=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_equals_hugging_face_in_fp32_to_the_bit(case):
    inputs = Inputs(case, torch.float32, "cpu")
    query, key = inputs.hugging_face()
    value = inputs.value.clone()
    inputs.run(rotary_cache_write_reference)
    torch.testing.assert_close((inputs.query, inputs.key), (query, key), rtol=0, atol=0)
    torch.testing.assert_close(inputs.value, value, rtol=0, atol=0)
    inputs.check_caches(key, value)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_within_twice_that_of_hugging_face(case, dtype, launch):
    inputs = Inputs(case, dtype)
    low_precision, exact = inputs.hugging_face(), inputs.exact()
    before = inputs.projection.clone()
    inputs.run(launch)
    for got, low, want in zip((inputs.query, inputs.key), low_precision, exact, strict=True):
        rounding = 0.5 * torch.finfo(dtype).eps * want.abs().max()
        budget = 2 * ((low.double() - want).abs().max() + rounding)
        error = (got.double() - want).abs().max()
        assert error <= budget, f"error {error:.3g}, budget {budget:.3g}"
    inputs.check_caches(inputs.key, inputs.value)
    untouched = case.num_query_heads * case.head_dim + case.num_kv_heads * case.head_dim
    torch.testing.assert_close(
        inputs.projection[:, untouched:], before[:, untouched:], rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_within_one_step_of_the_reference(case, dtype):
    kernel, reference = Inputs(case, dtype), Inputs(case, dtype)
    kernel.run(_launch_rotary_cache_write)
    reference.run(rotary_cache_write_reference)
    for got, want in ((kernel.query, reference.query), (kernel.key, reference.key)):
        step = torch.finfo(dtype).eps
        # A norm may round one step apart before the rotation mixes the two dimensions.
        atol = 2 * step * want.abs().max().item() if case.norm != "none" else 1e-6
        torch.testing.assert_close(got, want, rtol=step, atol=atol)


def test_norm_is_rounded_before_the_rotation():
    case = Case(num_tokens=8, norm="qwen3", head_dim=128)
    inputs, reference = Inputs(case, torch.bfloat16), Inputs(case, torch.bfloat16)
    wide = Inputs(case, torch.bfloat16)
    wide.query, wide.key = wide.query.float(), wide.key.float()
    wide.modules = [module.float() for module in wide.modules]
    unrounded = wide.hugging_face()[0].bfloat16()
    inputs.run(_launch_rotary_cache_write)
    reference.run(rotary_cache_write_reference)
    # The order of a sum may move a few results by a step; a missing rounding moves far more.
    apart, wrong = ((x != reference.query).sum() for x in (inputs.query, unrounded))
    assert apart * 20 < wrong


@BOTH
def test_padding_rows_write_nothing(launch):
    inputs = Inputs(Case(num_tokens=5), torch.float32)
    inputs.slot_mapping.fill_(-1)
    inputs.run(launch)
    assert bool(inputs.k_cache.isnan().all()) and bool(inputs.v_cache.isnan().all())


@BOTH
def test_query_stays_as_it_is_without_rotation_and_norm(launch):
    inputs = Inputs(Case(rotary=None), torch.bfloat16)
    before = inputs.projection.clone()
    inputs.run(launch)
    torch.testing.assert_close(inputs.projection, before, rtol=0, atol=0, equal_nan=True)


@BOTH
@pytest.mark.parametrize("which", ["q_norm", "k_norm"])
def test_one_norm_may_be_left_out(which, launch):
    case = Case(norm="qwen3", head_dim=40)
    inputs, plain = Inputs(case, torch.float32), Inputs(case, torch.float32)
    options = inputs.options()
    options.pop("k_norm" if which == "q_norm" else "q_norm")
    launch(*inputs.tensors(), **options)
    plain.modules[1 if which == "q_norm" else 0] = torch.nn.Identity()
    query, key = plain.hugging_face()
    torch.testing.assert_close((inputs.query, inputs.key), (query, key), rtol=1e-5, atol=1e-5)


@BOTH
@pytest.mark.parametrize("num_heads", [1, 3])
def test_heads_interleaved_in_one_projection(num_heads, launch):
    """GPT-NeoX keeps q, k and v of a head together: [num_tokens, num_heads, 3 * head_dim]."""
    inputs = Inputs(Case(num_query_heads=num_heads, num_kv_heads=num_heads), torch.float32)
    query, key = inputs.hugging_face()
    joint = torch.cat((inputs.query, inputs.key, inputs.value), dim=2)
    inputs.query, inputs.key, inputs.value = joint.split(16, dim=2)
    inputs.run(launch)
    torch.testing.assert_close((inputs.query, inputs.key), (query, key), rtol=1e-6, atol=1e-6)
    inputs.check_caches(inputs.key, inputs.value)


@BOTH
def test_separate_projections(launch):
    inputs = Inputs(Case(num_tokens=3, num_query_heads=5, num_kv_heads=1), torch.float32)
    query, key = inputs.hugging_face()
    inputs.query, inputs.key = inputs.query.clone(), inputs.key.clone()
    inputs.run(launch)
    torch.testing.assert_close((inputs.query, inputs.key), (query, key), rtol=1e-6, atol=1e-6)


@BOTH
def test_cache_of_a_lower_precision_holds_the_rounded_rows(launch):
    inputs = Inputs(Case(num_tokens=5), torch.float32)
    inputs.k_cache, inputs.v_cache = inputs.k_cache.bfloat16(), inputs.v_cache.bfloat16()
    inputs.run(launch)
    assert inputs.query.dtype == torch.float32
    inputs.check_caches(inputs.key.bfloat16(), inputs.value.bfloat16())


@BOTH
def test_fp32_norms_in_a_bf16_body_stay_fp32(launch):
    case = Case(norm="gemma3", head_dim=64)
    inputs = Inputs(case, torch.bfloat16)
    inputs.modules = [module.float() for module in inputs.modules]
    for module in inputs.modules:
        module.weight.data += 2.0**-10
    low_precision, exact = inputs.hugging_face(), inputs.exact()
    inputs.run(launch)
    for got, low, want in zip((inputs.query, inputs.key), low_precision, exact, strict=True):
        assert (got - want).abs().max() <= 2 * (low - want).abs().max()


@BOTH
def test_empty_batch(launch):
    inputs = Inputs(Case(num_tokens=0), torch.float32)
    inputs.run(launch)
    assert bool(inputs.k_cache.isnan().all())


def test_row_does_not_depend_on_the_batch():
    case = Case(num_tokens=7, norm="olmo2", head_dim=24)
    together, alone = Inputs(case, torch.bfloat16), Inputs(case, torch.bfloat16)
    together.run(_launch_rotary_cache_write)
    options = alone.options()
    for t in range(7):
        query, key, value, cos, sin, k_cache, v_cache, slots = alone.tensors()
        rows = (x[t : t + 1] for x in (query, key, value, cos, sin))
        _launch_rotary_cache_write(*rows, k_cache, v_cache, slots[t : t + 1], **options)
    for name in ("projection", "k_cache", "v_cache"):
        torch.testing.assert_close(
            getattr(together, name), getattr(alone, name), rtol=0, atol=0, equal_nan=True
        )


@BOTH
def test_cache_past_two_gibi_elements(launch):
    inputs = Inputs(Case(num_tokens=1, num_query_heads=1, num_kv_heads=1), torch.float16)
    # Blocks that nobody touches are never allocated.
    shape = (2**23 + 1, 1, 16, 16)
    inputs.k_cache = torch.empty(shape, dtype=torch.float16, device=DEVICE)
    inputs.v_cache = torch.empty(shape, dtype=torch.float16, device=DEVICE)
    inputs.slot_mapping.fill_(2**23 * 16 + 5)
    inputs.run(launch)
    assert torch.equal(inputs.k_cache[-1, 0, 5], inputs.key[0, 0])
    assert torch.equal(inputs.v_cache[-1, 0, 5], inputs.value[0, 0])


@pytest.mark.parametrize("case", [CASES[0], CASES[14], CASES[18]], ids=str)
def test_opcheck(case):
    inputs = Inputs(case, torch.float32)
    inputs.query, inputs.key, inputs.value = (
        x.clone() for x in (inputs.query, inputs.key, inputs.value)
    )
    torch.library.opcheck(
        torch.ops.torch_paged.rotary_cache_write.default, inputs.tensors(), inputs.options()
    )


def test_compiles_without_graph_breaks():
    compiled = torch.compile(rotary_cache_write, fullgraph=True, backend="eager")
    one, other = (Inputs(Case(norm="qwen3"), torch.float32) for _ in range(2))
    one.run(compiled)
    other.run(rotary_cache_write)
    torch.testing.assert_close(one.projection, other.projection, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(one.k_cache, other.k_cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(DEVICE == "cpu", reason="captures a CUDA graph")
def test_replay_writes_the_new_slots():
    captured, eager = (Inputs(Case(norm="qwen3", head_dim=128), torch.bfloat16) for _ in range(2))
    start = captured.projection.clone()
    graph = torch.cuda.CUDAGraph()
    captured.run(rotary_cache_write)
    with torch.cuda.graph(graph):
        captured.run(rotary_cache_write)
    captured.projection.copy_(start)
    captured.k_cache.fill_(float("nan"))
    captured.v_cache.fill_(float("nan"))
    captured.slot_mapping.copy_(captured.slot_mapping.flip(0))
    graph.replay()
    eager.slot_mapping.copy_(captured.slot_mapping)
    eager.run(rotary_cache_write)
    for name in ("projection", "k_cache", "v_cache"):
        torch.testing.assert_close(
            getattr(captured, name), getattr(eager, name), rtol=0, atol=0, equal_nan=True
        )


WRONG = {
    "query": (lambda i: i.query[0], "query must be floating"),
    "key": (lambda i: i.key.half(), "key must be floating .* dtype of query"),
    "value": (lambda i: i.value[:2], "value must have 3 tokens"),
    "cos": (lambda i: None, "both be given or both be None"),
    "sin": (lambda i: i.sin.half(), "sin must be contiguous float32"),
    "k_cache": (lambda i: i.k_cache[:, :1], r"k_cache must be \[num_blocks, 2, block_size, 16\]"),
    "v_cache": (lambda i: i.v_cache[:, :, :8], r"v_cache must be \[num_blocks, 2"),
    "slot_mapping": (
        lambda i: i.slot_mapping.int(),
        r"slot_mapping must be contiguous int64 .*\.long\(\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_named(name):
    inputs = Inputs(Case(), torch.float32)
    replacement, error = WRONG[name]
    setattr(inputs, name, replacement(inputs))
    with pytest.raises(ValueError, match=error):
        inputs.run(rotary_cache_write)


def test_wrong_gains_are_named():
    inputs = Inputs(Case(norm="qwen3"), torch.float32)
    inputs.modules[1] = inputs.modules[1].bfloat16()
    with pytest.raises(ValueError, match="k_norm must be torch.float32 like query"):
        inputs.run(rotary_cache_write)
    inputs = Inputs(Case(norm="olmo2"), torch.float32)
    inputs.modules[0].weight.data = torch.ones(16, device=DEVICE)
    with pytest.raises(ValueError, match=r"q_norm must be contiguous \[64\]"):
        inputs.run(rotary_cache_write)
