"""glu and activation against Hugging Face's activation modules."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from torch_paged.ops.glu import (
    ACTIVATIONS,
    _launch_activation,
    _launch_glu,
    activation,
    activation_reference,
    glu,
    glu_reference,
)

# The interpreter's numpy warns where exp(-x) becomes infinite, which the kernel is built on.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Hugging Face's name, ours, and whether both are the same torch function.
NAMES = [
    ("silu", "silu", True),
    ("gelu", "gelu", True),
    ("gelu_pytorch_tanh", "gelu_tanh", True),
    ("gelu_new", "gelu_tanh", False),
    ("gelu_fast", "gelu_tanh", False),
    ("quick_gelu", "quick_gelu", True),
    ("relu", "relu", True),
    ("relu2", "relu2", True),
    ("sigmoid", "sigmoid", True),
]
NAME_IDS = [name for name, _, _ in NAMES]
# One block of 1024 columns, its neighbours, several blocks.
SHAPES = [(1, 1), (3, 7), (2, 1023), (1, 1024), (2, 1025), (1, 2050)]


def _views(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up as neighbours in one projection, poisoned around them."""
    num_rows, width = shape
    generator = torch.Generator().manual_seed(width)
    wide = torch.full((num_rows, 2 * width + 3), float("nan"), dtype=dtype)
    wide[:, 1 : 2 * width + 1] = 3 * torch.randn(num_rows, 2 * width, generator=generator)
    wide = wide.to(DEVICE)
    return wide[:, 1 : width + 1], wide[:, width + 1 : 2 * width + 1]


def _assert_within_budget(
    got: torch.Tensor, low_precision: torch.Tensor, exact: torch.Tensor
) -> None:
    """Twice the low-precision reference's error and one rounding, over all elements."""
    assert got.dtype == low_precision.dtype and got.shape == exact.shape
    rounding = 0.5 * torch.finfo(got.dtype).eps * exact.abs().max()
    budget = 2 * ((low_precision.double() - exact).abs().max() + rounding)
    error = (got.double() - exact).abs().max()
    assert error <= budget, f"error {error:.3g}, budget {budget:.3g}"


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    """torch.empty returns NaN, so that an element left unwritten shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_every_name_is_tested():
    assert {ours for _, ours, _ in NAMES} == ACTIVATIONS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("theirs", "ours", "same"), NAMES, ids=NAME_IDS)
def test_reference_equals_hugging_face(theirs, ours, same, dtype):
    gate, up = (x.cpu() for x in _views((3, 1025), dtype))
    act = ACT2FN[theirs]
    limit = 0.0 if same else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(activation_reference(gate, ours), act(gate), rtol=limit, atol=limit)
    torch.testing.assert_close(
        glu_reference(gate, up, ours), act(gate) * up, rtol=limit, atol=8 * limit
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"T{s[0]}-I{s[1]}")
@pytest.mark.parametrize(("theirs", "ours", "same"), NAMES, ids=NAME_IDS)
def test_kernel_error_is_within_twice_that_of_hugging_face(theirs, ours, same, shape, dtype):
    gate, up = _views(shape, dtype)
    act = ACT2FN[theirs]
    exact = act(gate.double())
    _assert_within_budget(_launch_activation(gate, ours), act(gate), exact)
    _assert_within_budget(_launch_glu(gate, up, ours), act(gate) * up, exact * up.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ours", sorted(ACTIVATIONS))
def test_small_values_keep_their_relative_accuracy(ours, dtype):
    x = torch.tensor([[-3e-3, -1e-4, 1e-4, 3e-3]], dtype=dtype, device=DEVICE)
    exact = activation_reference(x.double(), ours)
    got = _launch_activation(x, ours).double()
    info = torch.finfo(dtype)
    limit = 2 * info.eps * exact.abs() + info.eps * info.smallest_normal
    assert bool(((got - exact).abs() <= limit).all()), f"{got} against {exact}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ours", sorted(ACTIVATIONS))
def test_extreme_values_end_as_in_torch(ours, dtype):
    top = torch.finfo(dtype).max
    x = torch.tensor([[-top, -200.0, 0.0, 200.0, top, float("nan")]], dtype=dtype, device=DEVICE)
    got, expected = _launch_activation(x, ours), activation_reference(x, ours)
    if ours == "gelu":
        # torch itself answers inf at the largest value, or not, by the length of the tensor.
        got, expected = got[:, :4], expected[:, :4]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_product_rounds_the_activation_first():
    # silu(x) is not a bf16 number; rounding it before the product changes the last bit somewhere.
    gate, up = _views((4, 1024), torch.bfloat16)
    got = _launch_glu(gate, up, "silu")
    rounded = torch.nn.functional.silu(gate) * up
    unrounded = (torch.nn.functional.silu(gate.float()) * up.float()).bfloat16()
    assert not torch.equal(rounded, unrounded)
    # The two differ in some hundred places; exp of the kernel and of torch may differ in a few.
    assert (got != rounded).sum() * 20 < (unrounded != rounded).sum()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_nothing_in_gives_nothing_out(shape):
    x = torch.empty(shape, device=DEVICE)
    assert _launch_glu(x, x, "silu").shape == shape
    assert _launch_activation(x, "silu").shape == shape
    assert glu(x, x, activation="silu").shape == shape


@pytest.mark.parametrize("ours", sorted(ACTIVATIONS))
def test_opcheck(ours):
    gate, up = _views((3, 10), torch.float32)
    torch.library.opcheck(torch.ops.torch_paged.glu.default, (gate, up, ours))
    torch.library.opcheck(torch.ops.torch_paged.activation.default, (gate, ours))


def test_compiles_without_graph_breaks():
    @torch.compile(fullgraph=True, backend="eager")
    def block(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return activation(glu(gate, up, activation="gelu_tanh"), activation="relu2")

    gate, up = _views((3, 10), torch.float32)
    expected = activation(glu(gate, up, activation="gelu_tanh"), activation="relu2")
    torch.testing.assert_close(block(gate, up), expected, rtol=0, atol=0)


def test_inputs_are_left_alone():
    gate, up = _views((3, 10), torch.float32)
    before = gate.clone(), up.clone()
    for launch in (_launch_glu, glu_reference):
        launch(gate, up, "relu")
        torch.testing.assert_close((gate, up), before, rtol=0, atol=0)


@pytest.mark.skipif(DEVICE == "cpu", reason="captures a CUDA graph")
def test_replay_equals_eager():
    gate, up = _views((3, 14336), torch.bfloat16)
    glu(gate, up, activation="silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = glu(gate, up, activation="silu")
    gate.mul_(-2)
    graph.replay()
    torch.testing.assert_close(captured, glu(gate, up, activation="silu"), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("gate", "up", "name", "error"),
    [
        (torch.ones(2, 4), torch.ones(2, 4), "swiglu", "activation must be one of gelu, .*swiglu"),
        (torch.ones(4), torch.ones(4), "silu", "gate must be floating"),
        (torch.ones(4, 2).t(), torch.ones(2, 4), "silu", "contiguous rows"),
        (torch.ones(2, 4), torch.ones(2, 5), "silu", r"up must be torch.float32 \[2, 4\]"),
        (torch.ones(2, 4), torch.ones(2, 4).half(), "silu", "up must be torch.float32"),
    ],
    ids=["name", "1-d", "columns", "shape", "dtype"],
)
def test_wrong_arguments_are_named(gate, up, name, error):
    with pytest.raises(ValueError, match=error):
        glu(gate, up, activation=name)
