"""Prompts of closed batches as CUDA graphs over buckets: short ones are not launch-bound."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from torch_paged.engine.large_prompts import large_token_buckets, most_large_padding
from torch_paged.engine.prompt_inputs import PromptInputs, Room, StaticInputs
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
        self._static: dict[Size, StaticInputs] = {}
        self._met: Counter[Size] = Counter()
        self._buckets = (*TOKEN_BUCKETS, *large_token_buckets(step.layer_flops))
        self._max_large_padding = most_large_padding(step.layer_flops)

    def __call__(self, inputs: PromptInputs) -> Tensor:
        """Return logits [num_rows, vocab_size] of the last tokens, valid until the next launch."""
        size = self._bucket(inputs)
        if size is None:
            return self._step.prefill(inputs.on_device(self._device).inputs)
        self._met[size] += 1
        met_enough = self._met[size] >= (_LARGE_MEETINGS if _is_large(size.tokens) else 2)
        static = self._static_inputs(size, inputs)
        static.load(inputs)
        key = ("prefill", self._step.variant, *size)

        def run() -> Tensor:
            return self._step.prefill(static.inputs)

        # The cache is written with the values that the replay writes again.
        if not met_enough or not self._graphs.prepare("a prefill", key, run, warmup=run):
            logits = run()
        else:
            replayed = self._graphs.replay(key)
            assert replayed is not None
            logits = replayed
        return logits[: inputs.num_pieces]

    def _bucket(self, inputs: PromptInputs) -> Size | None:
        if inputs.ids is None:
            return None
        num_tokens = inputs.num_tokens
        tokens = pick_bucket(num_tokens, self._buckets)
        rows = pick_bucket(inputs.num_pieces, ROW_BUCKETS)
        if tokens is None or rows is None:
            return None
        if _is_large(tokens) and tokens - num_tokens > self._max_large_padding:
            return None
        return Size(tokens, rows, inputs.whole_prompt and tokens >= WHOLE_PROMPT_TOKENS)

    def _static_inputs(self, size: Size, inputs: PromptInputs) -> StaticInputs:
        static = self._static.get(size)
        if static is None:
            static = self._static[size] = StaticInputs(
                Room(size.tokens, size.rows),
                len(inputs.slot_mappings),
                self._device,
                has_spans=inputs.spans is not None,
                tokens_on_host=False,
                whole_prompt=size.whole_prompt,
            )
        return static


def _is_large(tokens: int) -> bool:
    return tokens > TOKEN_BUCKETS[-1]
