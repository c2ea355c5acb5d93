"""Prompts of closed batches as CUDA graphs over buckets: short ones are not launch-bound."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from torch_paged.decoder.inputs import StepInputs
from torch_paged.engine.large_prompts import large_token_buckets, most_large_padding
from torch_paged.engine.protocols import StepModel
from torch_paged.graphs.buckets import pick_bucket
from torch_paged.graphs.capture import GraphCache
from torch_paged.ops.paged_attention.whole_prompt import WHOLE_PROMPT_TOKENS

# Past the last of these only small models have graphs: see `large_prompts`.
TOKEN_BUCKETS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)

# Few sizes, because each comes in every size of token bucket.
ROW_BUCKETS = (1, 8, 32)

# A capture takes the host as long as launching a prefill op by op some eight times does. Of many
# tokens the device is busy for most of that anyway, so such a size is captured once it has been
# met so often.
_LARGE_MEETINGS = 4


class Size(NamedTuple):
    """What a graph is for: tokens and rows up to these, one whole prompt or anything."""

    tokens: int
    rows: int
    whole_prompt: bool


class CapturedPrefill:
    """Runs a packed prefill in the next larger bucket of tokens and rows.

    A bucket is captured when it is met for the second time, a large one for the fourth: a shape
    that comes once is not worth a capture. Until then it runs the same padded inputs launch by
    launch, so that one prompt gives the same bits every time. Padding tokens belong to no row and
    are written nowhere; what is computed for them stays in their own rows of the activations.
    """

    def __init__(
        self,
        step: StepModel,
        device: torch.device,
        graphs: GraphCache[Tensor | None],
    ) -> None:
        self._step = step
        self._device = device
        self._graphs = graphs
        self._static: dict[Size, StepInputs] = {}
        self._met: Counter[Size] = Counter()
        self._buckets = (*TOKEN_BUCKETS, *large_token_buckets(step.layer_flops))
        self._max_large_padding = most_large_padding(step.layer_flops)

    def __call__(self, inputs: StepInputs) -> Tensor:
        """Return logits [num_rows, vocab_size] of the last tokens, valid until the next launch."""
        size = self._bucket(inputs)
        if size is None:
            return self._step.prefill(inputs)
        self._met[size] += 1
        met_enough = self._met[size] >= (_LARGE_MEETINGS if _is_large(size.tokens) else 2)
        static = self._load(size, inputs)
        key = ("prefill", self._step.variant, *size)

        def run() -> Tensor:
            return self._step.prefill(static)

        # The cache is written with the values that the replay writes again.
        if not met_enough or not self._graphs.prepare("a prefill", key, run, warmup=run):
            logits = run()
        else:
            replayed = self._graphs.replay(key)
            assert replayed is not None
            logits = replayed
        return logits[: inputs.slots.shape[0]]

    def _bucket(self, inputs: StepInputs) -> Size | None:
        if inputs.ids is None:
            return None
        num_tokens = inputs.ids.shape[0]
        tokens = pick_bucket(num_tokens, self._buckets)
        rows = pick_bucket(inputs.slots.shape[0], ROW_BUCKETS)
        if tokens is None or rows is None:
            return None
        if _is_large(tokens) and tokens - num_tokens > self._max_large_padding:
            return None
        return Size(tokens, rows, inputs.whole_prompt and tokens >= WHOLE_PROMPT_TOKENS)

    def _load(self, size: Size, inputs: StepInputs) -> StepInputs:
        """Return the static inputs of a bucket with these in them."""
        if size not in self._static:
            num_tables = len(inputs.slot_mappings)
            has_spans = inputs.spans is not None
            self._static[size] = _static_inputs(size, num_tables, self._device, has_spans)
        _load(self._static[size], inputs)
        return self._static[size]


def _is_large(tokens: int) -> bool:
    return tokens > TOKEN_BUCKETS[-1]


def _static_inputs(
    size: Size, num_tables: int, device: torch.device, has_spans: bool
) -> StepInputs:
    num_tokens, num_rows, whole_prompt = size

    def zeros(count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    with torch.inference_mode(False):
        return StepInputs(
            slots=zeros(num_rows, torch.int32),
            ids=zeros(num_tokens, torch.int64),
            positions=zeros(num_tokens, torch.int32),
            cu_seqlens=zeros(num_rows + 1, torch.int32),
            slot_mappings=tuple(zeros(num_tokens, torch.int64) for _ in range(num_tables)),
            last_index=zeros(num_rows, torch.int64),
            max_query_len=num_tokens,
            whole_prompt=whole_prompt,
            spans=zeros(num_tokens, torch.int32) if has_spans else None,
        )


def _load(static: StepInputs, inputs: StepInputs) -> None:
    """Copy a packed prefill into static inputs; the rest becomes padding."""
    assert inputs.ids is not None and inputs.cu_seqlens is not None
    tokens, rows = inputs.ids.shape[0], inputs.slots.shape[0]
    _put(static.ids, inputs.ids, 0)
    _put(static.positions, inputs.positions, 0)
    for mapping, new_mapping in zip(static.slot_mappings, inputs.slot_mappings, strict=True):
        _put(mapping, new_mapping, -1)
    if static.spans is not None:
        _put(static.spans, inputs.spans, 0)
    _put(static.slots, inputs.slots, -1)
    _put(static.last_index, inputs.last_index, 0)
    assert static.cu_seqlens is not None
    static.cu_seqlens[: rows + 1].copy_(inputs.cu_seqlens)
    # Padding rows are empty: they begin and end where the last real one ends.
    static.cu_seqlens[rows + 1 :].fill_(tokens)


def _put(target: Tensor | None, values: Tensor | None, fill: int) -> None:
    assert target is not None and values is not None
    target[: values.shape[0]].copy_(values)
    target[values.shape[0] :].fill_(fill)
