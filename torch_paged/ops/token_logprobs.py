"""Log-probability of one token a row: ``x[b, t[b]] - m - log sum_j exp(x[b, j] - m)``, in fp32.

Two small kernels read every logit once: each tile of a row gives its maximum and its sum of
exponentials, then one program a row merges them. The tile is the same for every batch size, so a
row's result does not depend on the batch.
"""

from __future__ import annotations

import torch

from torch_paged.ops.logits import check_logits
from torch_paged.ops.registration import register_op
from torch_paged.ops.triton_compat import (
    gdc_launch_dependents,
    gdc_wait,
    tl,
    triton,
    use_pdl,
)

_TILE = 4096


def token_logprobs_reference(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Gather ``log_softmax(logits.float())`` at `tokens`; 0 where a token is out of range."""
    valid = (tokens >= 0) & (tokens < logits.shape[1])
    index = torch.where(valid, tokens, 0)[:, None]
    logprobs = torch.log_softmax(logits.float(), dim=-1).gather(1, index)[:, 0]
    return logprobs.masked_fill_(~valid, 0.0)


@triton.jit
def _logprob_tiles_kernel(
    logits_ptr,
    maxima_ptr,
    sums_ptr,
    vocab_size,
    num_tiles,
    stride_b,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """maxima[b, t] = max of tile t; sums[b, t] = sum over tile t of exp(x - maxima[b, t])."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    index = tile * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    x = tl.load(
        logits_ptr + row * stride_b + index, mask=index < vocab_size, other=float("-inf")
    ).to(tl.float32)
    maximum = tl.max(x, axis=0)
    # A tile of -inf alone has the sum 0, not NaN.
    total = tl.sum(tl.exp(x - tl.where(maximum == float("-inf"), 0.0, maximum)), axis=0)
    tl.store(maxima_ptr + row * num_tiles + tile, maximum)
    tl.store(sums_ptr + row * num_tiles + tile, total)


@triton.jit
def _logprob_rows_kernel(
    logits_ptr,
    tokens_ptr,
    maxima_ptr,
    sums_ptr,
    logprobs_ptr,
    vocab_size,
    num_tiles,
    stride_b,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """logprobs[b] = x[b, t[b]] - m - log sum_t sums[b, t] * exp(maxima[b, t] - m)."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    in_row = tile < num_tiles
    if PDL:
        gdc_wait()
    token = tl.load(tokens_ptr + row)
    valid = (token >= 0) & (token < vocab_size)
    x = tl.load(logits_ptr + row * stride_b + token, mask=valid, other=0.0).to(tl.float32)
    maxima = tl.load(maxima_ptr + row * num_tiles + tile, mask=in_row, other=float("-inf"))
    sums = tl.load(sums_ptr + row * num_tiles + tile, mask=in_row, other=0.0)
    maximum = tl.max(maxima, axis=0)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.sum(sums * tl.exp(maxima - shift), axis=0)
    tl.store(logprobs_ptr + row, tl.where(valid, x - maximum - tl.log(total), 0.0))


def _launch_token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    num_rows, vocab_size = logits.shape
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return logprobs
    num_tiles = triton.cdiv(vocab_size, _TILE)
    partials = torch.empty(2, num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    maxima, sums = partials[0], partials[1]
    pdl = use_pdl(logits)
    launch = {"launch_pdl": True} if pdl else {}
    _logprob_tiles_kernel[(num_rows, num_tiles)](
        logits,
        maxima,
        sums,
        vocab_size,
        num_tiles,
        logits.stride(0),
        BLOCK=_TILE,
        PDL=pdl,
        num_warps=4,
        **launch,
    )
    _logprob_rows_kernel[(num_rows,)](
        logits,
        tokens,
        maxima,
        sums,
        logprobs,
        vocab_size,
        num_tiles,
        logits.stride(0),
        BLOCK=triton.next_power_of_2(num_tiles),
        PDL=pdl,
        num_warps=1,
        **launch,
    )
    return logprobs


def _token_logprobs_fake(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


_token_logprobs_op = register_op(
    "token_logprobs(Tensor logits, Tensor tokens) -> Tensor",
    cpu=token_logprobs_reference,
    cuda=_launch_token_logprobs,
    fake=_token_logprobs_fake,
)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return each row's log-probability of its token, float32 [num_rows].

    Args:
        logits: [num_rows, vocab_size], float32, bfloat16 or float16; contiguous in the last
            dimension, row stride free.
        tokens: [num_rows] int64, copied if it is not contiguous. A token outside the vocabulary
            (-1 in a padding row) gives 0.
    """
    if not torch.compiler.is_compiling():
        check_logits(logits)
        if tokens.dtype != torch.int64 or tokens.shape != logits.shape[:1]:
            raise TypeError(
                f"tokens must be int64 [{logits.shape[0]}], "
                f"got {tokens.dtype} {list(tokens.shape)}"
            )
    return _token_logprobs_op(logits, tokens.contiguous())


__all__ = ["token_logprobs", "token_logprobs_reference"]
