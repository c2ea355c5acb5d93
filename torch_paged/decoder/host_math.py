"""Arithmetic of the host form of a decode step, over numpy arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from torch_paged.decoder.spec import NormSpec

Array = np.ndarray  # float32 throughout, except for ids and positions
Call = Callable[[], None]


def update_call(source: Tensor, down: Tensor, up: Tensor, scaling: float, out: Tensor) -> Call:
    """Return ``out += scaling * source @ down @ up`` over static buffers."""
    with torch.inference_mode(False):
        small = source.new_zeros((source.shape[0], down.shape[1]))
        change = torch.zeros_like(out)

    def call() -> None:
        torch.mm(source, down, out=small)
        torch.mm(small, up, out=change)
        out.add_(change.mul_(scaling))

    return call


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
    "relu2": lambda x: nn.functional.relu(x).square(),
}


def view(array: Array, size: tuple[int, int]) -> Array:
    """Divide the inner dim of an array whose rows may be strided, without a copy."""
    row, item = array.strides
    shape = (array.shape[0], *size)
    return np.lib.stride_tricks.as_strided(array, shape, (row, size[1] * item, item))


def rms_scaler(gain: Array | None, spec: NormSpec) -> Callable[[Array, Array], None]:
    """Return ``scale(x, out)``: out = x / rms(x) * (gain + offset) over the last dim."""
    eps, offset = spec.eps, np.float32(spec.offset)

    def scale(x: Array, out: Array) -> None:
        mean = np.einsum("...i,...i->...", x, x, dtype=np.float32)
        mean /= x.shape[-1]
        mean += eps
        np.multiply(x, 1.0 / np.sqrt(mean)[..., None], out=out)
        if gain is not None:
            np.multiply(out, gain + offset if spec.offset else gain, out=out)

    return scale


def layer_scaler(
    gain: Array | None, bias: Array | None, spec: NormSpec
) -> Callable[[Array, Array], None]:
    """Return ``scale(x, out)``: out = (x - mean) / deviation * (gain + offset) + bias."""
    scale_rows = rms_scaler(gain, spec)

    def scale(x: Array, out: Array) -> None:
        scale_rows(x - x.mean(axis=-1, keepdims=True), out)
        if bias is not None:
            np.add(out, bias, out=out)

    return scale


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> None:
    """Turn the first 2R dims of x [num_rows, heads, dim] in place by cos and sin [num_rows, R]."""
    half = cos.shape[-1]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos[:, None], sin[:, None]
    turned = first * sin
    first *= cos
    first -= second * sin
    second *= cos
    second += turned


def attend(query: Array, keys: Array, values: Array, scale: float, slopes: Array | None) -> Array:
    """Attend query [Hq, D] over keys and values [Hkv, L, D] up to its own; [Hq, Dv]."""
    num_kv_heads = keys.shape[0]
    grouped = query.reshape(num_kv_heads, -1, query.shape[-1])
    scores = np.matmul(grouped, keys.transpose(0, 2, 1))
    scores *= np.float32(scale)
    if slopes is not None:
        scores += slopes * np.arange(1 - keys.shape[1], 1, dtype=np.float32)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return np.matmul(scores, values).reshape(query.shape[0], -1)


__all__ = [
    "ACTIVATIONS",
    "Array",
    "Call",
    "attend",
    "layer_scaler",
    "rms_scaler",
    "rotate",
    "update_call",
    "view",
]
