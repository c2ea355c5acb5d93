"""Linear layers over the sum of a stream and a normed branch, which is returned beside them.

    total = stream + norm(branch)       as `rms_norm_add` returns it
    y     = fused_linear(total)         with the norm, the activation and the gating of that op

Families with a norm behind each block compute this twice a layer. Of a row or two, where the
linear is a GEMV, one kernel does both, `joined_gemv.py`; elsewhere they are two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_paged.ops.fused_linear import _fused_linear_fake, _validate, fused_linear_reference
from torch_paged.ops.fused_linear.arguments import kernel_arguments
from torch_paged.ops.fused_linear.configs import (
    GemvConfig,
    Problem,
    choose_config,
    device_key,
    joined_config,
)
from torch_paged.ops.fused_linear.launch import _launch_fused_linear
from torch_paged.ops.fused_linear.start import start_joined_gemv
from torch_paged.ops.registration import register_op
from torch_paged.ops.rms_norm import (
    _check,
    _check_residual,
    _rms_norm_add_fake,
    rms_norm_add_reference,
)
from torch_paged.ops.rms_norm.kernel import _launch_rms_norm_add, out_dtype

__all__ = ["joined_linear", "joined_linear_reference"]


def joined_linear_reference(
    branch: Tensor,
    stream: Tensor,
    join_weight: Tensor | None,
    join_eps: float,
    join_offset: float,
    join_cast_before_gain: bool,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    norm_weight: Tensor | None = None,
    norm: bool = False,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    activation: str = "",
    gated: bool = False,
    counters: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute one op after the other with torch."""
    join = (join_weight, join_eps, join_offset, join_cast_before_gain)
    total = rms_norm_add_reference(branch, stream, *join)
    prologue = (norm_weight, norm, eps, norm_offset, cast_before_gain)
    y = fused_linear_reference(total, weights, biases, *prologue, None, activation, gated)
    return y, total


def _launch_joined_linear(
    branch: Tensor,
    stream: Tensor,
    join_weight: Tensor | None,
    join_eps: float,
    join_offset: float,
    join_cast_before_gain: bool,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    norm_weight: Tensor | None = None,
    norm: bool = False,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    activation: str = "",
    gated: bool = False,
    counters: Tensor | None = None,
    *,
    config: GemvConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch one kernel where there is one, of `config` if given, and two where there is none."""
    join_cast = join_cast_before_gain and join_offset == 0.0
    if config is None and _is_plain(branch, stream, join_weight, join_cast, weights):
        num_tokens, in_features = stream.shape
        problem = Problem(num_tokens, sum(w.shape[0] for w in weights), in_features, gated)
        key = device_key(stream.device)
        config = joined_config(key, choose_config(key, problem, stream.dtype, True), problem)
    if config is None:
        join = (join_weight, join_eps, join_offset, join_cast_before_gain)
        total = _launch_rms_norm_add(branch, stream, *join)
        prologue = (norm_weight, norm, eps, norm_offset, cast_before_gain)
        rest = (None, activation, gated, counters)
        return _launch_fused_linear(total, weights, biases, *prologue, *rest), total
    sizes = [w.shape[0] for w in (weights[:1] if gated else weights)]
    y = stream.new_empty((stream.shape[0], sum(sizes)))
    total = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
    arguments = kernel_arguments(
        stream,
        weights,
        biases,
        norm_weight,
        norm,
        eps,
        norm_offset,
        None,
        activation,
        gated,
        y,
        beside=(branch,),
    )
    normed = (join_weight, join_eps, join_offset, join_cast)
    start_joined_gemv(config, branch, *normed, total, sizes, arguments)
    return y, total


def _is_plain(
    branch: Tensor,
    stream: Tensor,
    join_weight: Tensor | None,
    join_cast: bool,
    weights: Sequence[Tensor],
) -> bool:
    """Say whether one kernel takes these: something to do, all of it in one dtype of 16 bits.

    Of float32 the sum would differ from that of `rms_norm_add` in its last bit, or between one
    row and two: a product and a sum between which nothing rounds become one operation or not.
    """
    dtype = out_dtype(branch.dtype, join_weight, join_cast)
    if dtype.itemsize != 2 or not dtype == branch.dtype == stream.dtype == weights[0].dtype:
        return False
    return stream.numel() > 0 and sum(w.shape[0] for w in weights) > 0


def _joined_linear_fake(
    branch: Tensor,
    stream: Tensor,
    join_weight: Tensor | None,
    join_eps: float,
    join_offset: float,
    join_cast_before_gain: bool,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    norm_weight: Tensor | None = None,
    norm: bool = False,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    activation: str = "",
    gated: bool = False,
    counters: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    join = (join_weight, join_eps, join_offset, join_cast_before_gain)
    total = _rms_norm_add_fake(branch, stream, *join)
    return _fused_linear_fake(total, weights, biases, gated=gated), total


_joined_linear = register_op(
    "joined_linear(Tensor branch, Tensor stream, Tensor? join_weight, float join_eps, "
    "float join_offset, bool join_cast_before_gain, Tensor[] weights, Tensor?[] biases, "
    "Tensor? norm_weight=None, bool norm=False, float eps=0.0, float norm_offset=0.0, "
    'bool cast_before_gain=True, str activation="", bool gated=False, '
    "Tensor(a!)? counters=None) -> (Tensor, Tensor)",
    cpu=joined_linear_reference,
    cuda=_launch_joined_linear,
    fake=_joined_linear_fake,
)


def joined_linear(
    branch: Tensor,
    stream: Tensor,
    join_weight: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] = (),
    norm_weight: Tensor | None = None,
    *,
    join_eps: float,
    join_offset: float = 0.0,
    join_cast_before_gain: bool = True,
    norm: bool = False,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    cast_before_gain: bool = True,
    activation: str = "",
    gated: bool = False,
    counters: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply up to three linear layers to `stream` plus the normed `branch`.

    Args:
        branch: [num_tokens, in_features], last dim contiguous, row stride free.
        stream: like `branch`.
        join_weight: [in_features], the gain of the norm of `branch`; None: no gain. That norm has
            `join_eps`, `join_offset` and `join_cast_before_gain`, which are those of
            :func:`torch_paged.ops.rms_norm.rms_norm_add`.

    The other arguments are those of :func:`torch_paged.ops.fused_linear.fused_linear`, which is
    given the sum as `x`.

    Returns:
        What `fused_linear` returns for the sum, and the sum, contiguous, as `rms_norm_add` rounds
        it.

    Raises:
        ValueError: shapes, strides or options do not fit together.
        TypeError: a weight or a bias is not of the dtype of the sum.
        NotImplementedError: the rows are wider than 32768.
    """
    join = (join_weight, join_eps, join_offset, join_cast_before_gain)
    if not torch.compiler.is_compiling():
        if branch.dim() != 2:
            raise ValueError(f"branch must be [num_tokens, in_features], got {list(branch.shape)}")
        _check(branch, join_weight)
        _check_residual(branch, stream)
        total = _rms_norm_add_fake(branch.to("meta"), stream.to("meta"), *join)
        _validate(total, weights, biases, norm_weight, norm, None, activation, gated, counters)
    return _joined_linear(
        branch,
        stream,
        *join,
        weights,
        biases,
        norm_weight,
        norm,
        eps,
        norm_offset,
        cast_before_gain,
        activation,
        gated,
        counters,
    )
