"""The scores among which `sample` draws: those of the support, all others being -inf."""

from __future__ import annotations

from torch_paged.ops.sample.parts import is_kept, order_value
from torch_paged.ops.triton_compat import gdc_launch_dependents, gdc_wait, tl, triton


@triton.jit
def _scores_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    min_p_ptr,
    support_ptr,
    scores_ptr,
    vocab_size,
    stride_b,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    """scores[b, i] = logits[b, i] * scale in the support, else -inf; the logits if not drawn."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = token < vocab_size
    x = tl.load(logits_ptr + row * stride_b + token, mask=in_row, other=float("-inf"))
    score = x.to(tl.float32)
    first_tie = tl.load(support_ptr + row * 3 + 1)
    if first_tie >= 0:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        least = tl.load(support_ptr + row * 3)
        top_key = tl.load(support_ptr + row * 3 + 2).to(tl.int32)
        min_p = tl.load(min_p_ptr + slot).to(tl.float32)
        scale = tl.div_rn(1.0, tl.load(temperature_ptr + slot).to(tl.float32))
        logit = score
        score = logit * scale
        weight = tl.exp(score - order_value(top_key) * scale)
        top = (top_key >> SHIFT).to(tl.int64)
        kept = is_kept(logit, token, weight, least, first_tie, min_p, top, SHIFT)
        score = tl.where(kept, score, float("-inf"))
    tl.store(scores_ptr + row * vocab_size + token, score, mask=in_row)
