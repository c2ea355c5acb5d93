"""What a bound plan reads besides the model's parameters, and the shape of its callables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from torch_paged.decoder.spec import NormSpec
from torch_paged.decoder.state import SlotState


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The few tokens of a row as rows of their own, each of which ends with itself.

    Attention of a decode step over them shares a long context among many programs, where that of a
    prefill walks it with one program a head.

    Attributes:
        block_tables: by table, [num_tokens, max_blocks] int32: the same blocks for all.
        slots: [num_tokens] int32: 0, 1 and so on, -1 for padding.
        context_lens: [num_tokens] int32 tokens in front of each.
    """

    block_tables: tuple[Tensor, ...]
    slots: Tensor
    context_lens: Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of one step; a decode step has `slots` only.

    Attributes:
        slots: [num_rows] int32 slot of each row, -1 for the padding rows of a bucket.
        ids: [num_tokens] int64 packed prompt ids (or `embeddings` [num_tokens, hidden_size]).
        positions: [num_tokens] int32 rotary positions.
        cu_seqlens: [num_rows + 1] int32 bounds of the rows in the packing.
        slot_mappings: by block table, [num_tokens] int64 flat cache index of each token.
        last_index: int64 index of each row's last token in the packing, [num_rows], and behind
            these of further tokens whose logits are asked for.
        max_query_len: tokens of the longest row.
        lengths: tokens of each row, where the host knows them.
        whole_prompt: the packing begins with one row of which the cache holds nothing yet, and
            has no other.
        decoding: [num_decoding] int32 slots of rows that decode beside the prompts, -1 for
            padding. The packing begins with their last tokens, which `slots` has as a row of slot
            -1, and `last_index` with 0 to num_decoding - 1, in the place of that row.
        spans: [num_tokens] int32 lengths that rotary frequencies depend on; for models where they
            do.
        token_rows: of a single row with a few tokens, these as rows.
    """

    slots: Tensor
    ids: Tensor | None = None
    embeddings: Tensor | None = None
    positions: Tensor | None = None
    cu_seqlens: Tensor | None = None
    slot_mappings: tuple[Tensor, ...] = ()
    last_index: Tensor | None = None
    max_query_len: int = 1
    lengths: tuple[int, ...] = ()
    whole_prompt: bool = False
    decoding: Tensor | None = None
    spans: Tensor | None = None
    token_rows: TokenRows | None = None


def put_decoding(state: SlotState, inputs: StepInputs) -> None:
    """Put the last tokens of decoding rows in front of the prompts that they share a step with."""
    if inputs.decoding is not None:
        assert inputs.ids is not None and inputs.positions is not None
        state.put_last_tokens(inputs.decoding, inputs.ids, inputs.positions)


@dataclass(frozen=True, slots=True)
class Binding:
    """What a plan is bound to besides the model's parameters.

    Attributes:
        keys: by layer, where it keeps its keys; `values` likewise. Layers of different block
            tables may share a tensor.
        tables: by layer, the number of its block table.
    """

    state: SlotState
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    tables: tuple[int, ...]

    def block_table(self, layer: int) -> Tensor:
        """Return the block table [max_num_seqs, max_blocks] int32 of a layer."""
        return self.state.block_tables[self.tables[layer]]


Values = dict[str, Tensor]
Call = Callable[[Values, StepInputs], None]


def gain(spec: NormSpec) -> Tensor | None:
    """Return the norm's own weight, or None when it has none."""
    weight = getattr(spec.ref.module, "weight", None)
    return None if weight is None else weight.detach()
