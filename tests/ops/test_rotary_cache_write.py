"""rotary_cache_write against Hugging Face's norms and rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as rotate_cohere
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_glm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_llama
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from torch_paged.ops.rotary_cache_write import (
    rotary_cache_write,
    rotary_cache_write_reference,
)
from torch_paged.ops.rotary_cache_write.kernel import _launch_rotary_cache_write

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOTH = pytest.mark.parametrize(
    "launch", [_launch_rotary_cache_write, rotary_cache_write_reference], ids=["kernel", "cpu"]
)
EPS = 1e-6
NUM_BLOCKS = 7


@dataclass(frozen=True)
class Norm:
    """A norm module of Hugging Face and the arguments that stand for it."""

    cls: type[torch.nn.Module]
    offset: float = 0.0
    cast_before_gain: bool = True
    full_width: bool = False


NORMS = {
    "none": None,
    "qwen3": Norm(Qwen3RMSNorm),
    "gemma3": Norm(Gemma3RMSNorm, offset=1.0, cast_before_gain=False),
    "olmo2": Norm(Olmo2RMSNorm, cast_before_gain=False, full_width=True),
    "olmoe": Norm(OlmoeRMSNorm, full_width=True),
}


@dataclass(frozen=True)
class Case:
    """Shapes and variants of one call."""

    num_tokens: int = 3
    num_query_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    value_dim: int | None = None
    rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = rotate_llama
    num_freqs: int | None = None
    norm: str = "none"
    block_size: int = 16

    def __str__(self) -> str:
        rotary = self.rotary.__module__.rpartition("_")[2] if self.rotary else "nope"
        return (
            f"T{self.num_tokens}-H{self.num_query_heads}:{self.num_kv_heads}-D{self.head_dim}"
            f":{self.value_dim or self.head_dim}-{rotary}{self.num_freqs or ''}-{self.norm}"
            f"-bs{self.block_size}"
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


class Inputs:
    """Tensors of a call: q, k and v inside one poisoned projection, and poisoned caches."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str = DEVICE) -> None:
        generator = torch.Generator().manual_seed(case.num_tokens + case.head_dim)
        self.case = case
        num_tokens, d, dv = case.num_tokens, case.head_dim, case.value_dim or case.head_dim
        widths = [case.num_query_heads * d, case.num_kv_heads * d, case.num_kv_heads * dv]
        self.projection = torch.full((num_tokens, sum(widths) + 3), float("nan"), dtype=dtype)
        self.projection[:, : sum(widths)] = 2 * torch.randn(
            num_tokens, sum(widths), generator=generator
        )
        self.projection = self.projection.to(device)
        query, key, value = self.projection[:, : sum(widths)].split(widths, dim=1)
        self.query = query.view(num_tokens, case.num_query_heads, d)
        self.key = key.view(num_tokens, case.num_kv_heads, d)
        self.value = value.view(num_tokens, case.num_kv_heads, dv)
        blocks = (NUM_BLOCKS, case.num_kv_heads, case.block_size)
        self.k_cache = torch.full((*blocks, d), float("nan"), dtype=dtype, device=device)
        self.v_cache = torch.full((*blocks, dv), float("nan"), dtype=dtype, device=device)
        order = torch.randperm(NUM_BLOCKS * case.block_size, generator=generator)
        # The last row of a batch is padding.
        slots = order[:num_tokens].clone()
        slots[1:][-1:] = -1
        self.slot_mapping = slots.to(device)
        self.cos = self.sin = None
        if case.rotary is not None:
            num_freqs = case.num_freqs or d // 2
            positions = torch.randint(0, 500, (num_tokens, 1), generator=generator)
            angles = positions / 10000.0 ** (torch.arange(num_freqs) / num_freqs)
            self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)
        self.modules = [
            self._norm_module(heads, dtype, generator).to(device)
            for heads in (case.num_query_heads, case.num_kv_heads)
        ]

    def _norm_module(
        self, num_heads: int, dtype: torch.dtype, generator: torch.Generator
    ) -> torch.nn.Module:
        norm = NORMS[self.case.norm]
        if norm is None:
            return torch.nn.Identity()
        module = norm.cls((num_heads if norm.full_width else 1) * self.case.head_dim, eps=EPS)
        module.weight.data += 0.3 * torch.randn(module.weight.shape, generator=generator)
        return module.to(dtype).requires_grad_(False)

    def options(self) -> dict[str, object]:
        norm = NORMS[self.case.norm]
        options: dict[str, object] = {
            "interleaved": self.case.rotary in (rotate_cohere, rotate_glm)
        }
        if norm is not None:
            options |= {
                "q_norm": self.modules[0].weight,
                "k_norm": self.modules[1].weight,
                "eps": EPS,
                "norm_offset": norm.offset,
                "cast_before_gain": norm.cast_before_gain,
                "full_width_norm": norm.full_width,
            }
        return options

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        rotary = (self.cos, self.sin)
        caches = (self.k_cache, self.v_cache, self.slot_mapping)
        return (self.query, self.key, self.value, *rotary, *caches)

    def run(self, launch: Callable[..., None]) -> None:
        assert launch(*self.tensors(), **self.options()) is None

    def hugging_face(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and key as the attention of a Hugging Face model computes them."""
        norm = NORMS[self.case.norm]
        rows = [self.query, self.key]
        for i, x in enumerate(rows):
            whole = norm is not None and norm.full_width
            rows[i] = self.modules[i](x.flatten(1) if whole else x).reshape(x.shape)
        return self._rotated(rows, self.query.dtype)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in fp64, without any rounding."""
        norm = NORMS[self.case.norm]
        rows = [self.query.double(), self.key.double()]
        for i, x in enumerate(rows if norm is not None else ()):
            gain = self.modules[i].weight.double() + norm.offset
            x = x.flatten(1) if norm.full_width else x
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
            rows[i] = (x * scale * gain).reshape(rows[i].shape)
        return self._rotated(rows, torch.float64)

    def _rotated(
        self, rows: list[torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotary = self.case.rotary
        if rotary is None or self.cos is None or self.sin is None:
            return rows[0], rows[1]
        if rotary is rotate_cohere:
            # Its apply function works in fp32, even on fp64; its tables hold pairs.
            if dtype == torch.float64:
                rotary = rotate_glm
            else:
                cos, sin = (t.to(dtype).repeat_interleave(2, -1) for t in (self.cos, self.sin))
                return rotary(rows[0], rows[1], cos, sin, unsqueeze_dim=1)
        cos, sin = (torch.cat((t, t), -1).to(dtype) for t in (self.cos, self.sin))
        if rotary is rotate_glm:
            return rotary(rows[0], rows[1], cos, sin, unsqueeze_dim=1)
        # Partial rotation as the attention modules of Phi and StableLM slice it.
        turned = cos.shape[-1]
        parts = rotary(*(x[..., :turned] for x in rows), cos, sin, unsqueeze_dim=1)
        first, second = (
            torch.cat((part, x[..., turned:]), -1) for part, x in zip(parts, rows, strict=True)
        )
        return first, second

    def check_caches(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Exactly the mapped slots hold key and value; all others are still poisoned."""
        bs = self.case.block_size
        for cache, rows in ((self.k_cache, key), (self.v_cache, value)):
            expected = torch.full_like(cache, float("nan"))
            for row, slot in zip(rows, self.slot_mapping.tolist(), strict=True):
                if slot >= 0:
                    expected[slot // bs, :, slot % bs] = row
            torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


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
    "slot_mapping": (lambda i: i.slot_mapping.int(), r"slot_mapping must be int64 .*\.long\(\)"),
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
