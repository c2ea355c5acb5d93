"""Prefill as CUDA graphs over token-count buckets, so that short prompts are not launch-bound."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from torch_paged.decoder.inputs import StepInputs
from torch_paged.engine.protocols import StepModel
from torch_paged.graphs.buckets import pick_bucket
from torch_paged.graphs.capture import GraphCache

# Past the last bucket the device is busy for longer than the launches take, and activations of
# that size should not stay in the graphs' pool.
TOKEN_BUCKETS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)

# Rows of a closed batch: few sizes, because each comes in every size of token bucket.
BATCH_ROW_BUCKETS = (1, 8, 32)

# A few rows in every size of step: admissions come in ones and twos, and a graph costs a capture.
SERVING_ROW_BUCKETS = (8,)


class CapturedPrefill:
    """Runs a packed prefill in the next larger bucket of tokens and rows.

    A bucket is captured when it is met for the second time: a shape that comes once is not worth
    a capture. Padding tokens belong to no row and are written nowhere; what is computed for them
    stays in their own rows of the activations.

    Args:
        name: of its graphs; two objects over one cache need two names.
    """

    def __init__(
        self,
        step: StepModel,
        device: torch.device,
        graphs: GraphCache[Tensor | None],
        row_buckets: Sequence[int],
        name: str = "prefill",
    ) -> None:
        self._name = name
        self._step = step
        self._device = device
        self._graphs = graphs
        self._row_buckets = tuple(row_buckets)
        self._static: dict[tuple[int, int], StepInputs] = {}
        self._sampled: dict[tuple[int, int], Tensor] = {}  # slots whose rows sample, else -1
        self._logits: dict[tuple[int, int], Tensor] = {}  # static outputs of the graphs
        self._met: set[tuple[int, int]] = set()

    def __call__(self, inputs: StepInputs) -> Tensor:
        """Return logits [num_rows, vocab_size] of the last tokens, valid until the next launch."""
        size = self._met_before(inputs)
        if size is None:
            return self._step.prefill(inputs)
        static = self._static[size]
        _load(static, inputs)
        key = (self._name, *size, self._step.variant)

        def run() -> Tensor:
            return self._step.prefill(static)

        # The cache is written with the values that the replay writes again.
        if not self._graphs.prepare("a prefill", key, run, warmup=run):
            return self._step.prefill(inputs)
        logits = self._graphs.replay(key)
        assert logits is not None
        self._logits[size] = logits
        return logits[: inputs.slots.shape[0]]

    def tail(
        self,
        logits: Tensor,
        inputs: StepInputs,
        slots: Tensor,
        tail: Callable[[Tensor, Tensor], None],
        tail_key: Hashable,
    ) -> None:
        """Run `tail(logits, slots)` behind the prefill just run, as a graph if that was one."""
        size = self._bucket(inputs)
        static = None if size is None else self._logits.get(size)
        if size is None or static is None or static.data_ptr() != logits.data_ptr():
            tail(logits, slots)
            return
        sampled, all_logits = self._sampled[size], static
        key = (self._name, "tail", *size, static.data_ptr(), tail_key)

        def whole_tail() -> None:
            tail(all_logits, sampled)

        if key not in self._graphs:
            # It appends tokens, so it warms up on padding rows alone.
            sampled.fill_(-1)
            if not self._graphs.prepare("a prefill's end", key, whole_tail, warmup=whole_tail):
                tail(logits, slots)
                return
        _put(sampled, slots, -1)
        self._graphs.replay(key)

    def _met_before(self, inputs: StepInputs) -> tuple[int, int] | None:
        """Return the bucket of the inputs, with static inputs, from its second time on."""
        size = self._bucket(inputs)
        if size is None or size not in self._met:
            if size is not None:
                self._met.add(size)
            return None
        if size not in self._static:
            num_tables = len(inputs.slot_mappings)
            self._static[size] = _static_inputs(
                *size, num_tables, self._device, inputs.spans is not None
            )
            with torch.inference_mode(False):
                self._sampled[size] = torch.full(
                    (size[1],), -1, dtype=torch.int32, device=self._device
                )
        return size

    def _bucket(self, inputs: StepInputs) -> tuple[int, int] | None:
        if inputs.ids is None:
            return None
        tokens = pick_bucket(inputs.ids.shape[0], TOKEN_BUCKETS)
        rows = pick_bucket(inputs.slots.shape[0], self._row_buckets)
        return None if tokens is None or rows is None else (tokens, rows)


def _static_inputs(
    num_tokens: int, num_rows: int, num_tables: int, device: torch.device, has_spans: bool
) -> StepInputs:
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
