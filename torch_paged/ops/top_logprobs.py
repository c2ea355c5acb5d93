"""The n most likely tokens a row: the largest of ``x[b, i] - log sum_j exp x[b, j]``, in order.

Equal logits come in order of their index; -inf is never among them. No sort: n is small, so each
tile of a row takes its maximum n times, and one program a row takes it n times from what the tiles
found. A word orders by logit first and by lowest index second, so a row's result depends neither
on the batch nor on the order in which programs run, which `torch.topk` does not promise for ties,
and two small kernels that read each logit once replace its half a dozen passes. The tiles are
those of `token_logprobs`, and so are the numbers.
"""

from __future__ import annotations

import torch

from torch_paged.ops.argmax import order_key, pack_choice, unpack_index
from torch_paged.ops.logits import check_logits
from torch_paged.ops.registration import register_op
from torch_paged.ops.triton_compat import (
    gdc_launch_dependents,
    gdc_wait,
    tl,
    triton,
    use_pdl,
)

MAX_TOP_LOGPROBS = 20
_TILE = 4096


def top_logprobs_reference(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the `count` largest of ``log_softmax(logits.float())``, as the docstring above says."""
    num_rows, vocab_size = logits.shape
    ids = torch.full((num_rows, count), -1, dtype=torch.int32, device=logits.device)
    logprobs = torch.full((num_rows, count), -torch.inf, dtype=torch.float32, device=logits.device)
    x = logits.float()
    bits = torch.where(x == 0.0, 0.0, x).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill_(x.isnan(), 0x7FFFFFFF)
    index = torch.arange(vocab_size, device=logits.device)
    words = (keys.long() << 32) | (0x7FFFFFFF - index)
    found = min(count, vocab_size)
    best = 0x7FFFFFFF - (torch.topk(words, found, dim=1).values & 0x7FFFFFFF)
    values = torch.log_softmax(x, dim=-1).gather(1, best)
    has_mass = x.gather(1, best) != -torch.inf
    ids[:, :found] = torch.where(has_mass, best, -1)
    logprobs[:, :found] = values.masked_fill_(~has_mass, -torch.inf)
    return ids, logprobs


@triton.jit
def _order_value(key):
    """Return the fp32 value of an `order_key`; NaN for NaN."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _top_tiles_kernel(
    logits_ptr,
    words_ptr,
    maxima_ptr,
    sums_ptr,
    vocab_size,
    num_tiles,
    count,
    stride_b,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """words[b, t] = the `count` largest words of tile t; maxima and sums as in token_logprobs."""
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
    # A masked lane is a -inf, which is left out at the end.
    words = pack_choice(order_key(x), index)
    out = words_ptr + (row * num_tiles + tile) * count
    for place in range(count):
        best = tl.max(words, axis=0)
        tl.store(out + place, best)
        words = tl.where(words == best, -0x8000000000000000, words)


@triton.jit
def _top_rows_kernel(
    words_ptr,
    maxima_ptr,
    sums_ptr,
    ids_ptr,
    logprobs_ptr,
    num_tiles,
    count,
    TILES_BLOCK: tl.constexpr,
    WORDS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """ids[b], logprobs[b] = the `count` largest words of the row, as tokens and x - m - log s."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES_BLOCK)
    lane = tl.arange(0, WORDS_BLOCK)
    in_row = tile < num_tiles
    num_words = num_tiles * count
    if PDL:
        gdc_wait()
    maxima = tl.load(maxima_ptr + row * num_tiles + tile, mask=in_row, other=float("-inf"))
    sums = tl.load(sums_ptr + row * num_tiles + tile, mask=in_row, other=0.0)
    words = tl.load(
        words_ptr + row * num_words + lane, mask=lane < num_words, other=-0x8000000000000000
    )
    maximum = tl.max(maxima, axis=0)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    log_total = tl.log(tl.sum(sums * tl.exp(maxima - shift), axis=0))
    for place in range(count):
        best = tl.max(words, axis=0)
        key = (best >> 32).to(tl.int32)
        # The key of -inf; a word that is no word has a smaller one.
        has_mass = key > -2139095041
        value = _order_value(key) - maximum - log_total
        at = row * count + place
        tl.store(ids_ptr + at, tl.where(has_mass, unpack_index(best), -1).to(tl.int32))
        tl.store(logprobs_ptr + at, tl.where(has_mass, value, float("-inf")))
        words = tl.where(words == best, -0x8000000000000000, words)


def _launch_top_logprobs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, vocab_size = logits.shape
    ids, logprobs = _top_logprobs_fake(logits, count)
    if num_rows == 0:
        return ids, logprobs
    num_tiles = triton.cdiv(vocab_size, _TILE)
    words = torch.empty(num_rows, num_tiles, count, dtype=torch.int64, device=logits.device)
    partials = torch.empty(2, num_rows, num_tiles, dtype=torch.float32, device=logits.device)
    maxima, sums = partials[0], partials[1]
    pdl = use_pdl(logits)
    launch = {"launch_pdl": True} if pdl else {}
    _top_tiles_kernel[(num_rows, num_tiles)](
        logits,
        words,
        maxima,
        sums,
        vocab_size,
        num_tiles,
        count,
        logits.stride(0),
        BLOCK=_TILE,
        PDL=pdl,
        num_warps=4,
        **launch,
    )
    _top_rows_kernel[(num_rows,)](
        words,
        maxima,
        sums,
        ids,
        logprobs,
        num_tiles,
        count,
        TILES_BLOCK=triton.next_power_of_2(num_tiles),
        WORDS_BLOCK=triton.next_power_of_2(num_tiles * count),
        PDL=pdl,
        num_warps=1,
        **launch,
    )
    return ids, logprobs


def _top_logprobs_fake(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], count)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


_top_logprobs_op = register_op(
    "top_logprobs(Tensor logits, int count) -> (Tensor, Tensor)",
    cpu=top_logprobs_reference,
    cuda=_launch_top_logprobs,
    fake=_top_logprobs_fake,
)


def top_logprobs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely tokens int32 and their log-probabilities float32, [num_rows, count].

    Where fewer than `count` tokens have a probability above 0, token -1 with -inf fills the rest.

    Args:
        logits: [num_rows, vocab_size], float32, bfloat16 or float16; contiguous in the last
            dimension, row stride free.
        count: 1 to `MAX_TOP_LOGPROBS`.
    """
    if not torch.compiler.is_compiling():
        check_logits(logits)
        if not 1 <= count <= MAX_TOP_LOGPROBS:
            raise ValueError(f"count must be 1 to {MAX_TOP_LOGPROBS}, got {count}")
    return _top_logprobs_op(logits, count)


__all__ = ["MAX_TOP_LOGPROBS", "top_logprobs", "top_logprobs_reference"]
