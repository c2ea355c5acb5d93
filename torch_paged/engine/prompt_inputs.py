"""What a step over prompts takes: packed on the host, and where graphs read it on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_paged.decoder.inputs import StepInputs
from torch_paged.decoder.transfer import WORD, Arrays, aligned_starts, cut_words, upload

Array = npt.NDArray[Any]


class OnDevice(NamedTuple):
    """Inputs of a step, and what belongs to them: see `PromptInputs`."""

    inputs: StepInputs
    ends: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """Packed pieces of prompts, as `StepInputs` has them; what is on the device already stays.

    Attributes:
        slots, cu_seqlens, last_index, slot_mappings, embeddings, lengths, whole_prompt: see there.
        ids, positions, spans: likewise, on the host or on the device.
        ends: int32 slots in which a token is sampled, in the order of `last_index`: those of the
            decoding rows, then one a piece, -1 where its prompt goes on.
        targets: int64 [num_scored] prompt tokens that follow those whose logits are asked for
            behind the rows.
        num_decoding: rows that decode in the same step, in front.
    """

    slots: Array
    cu_seqlens: Array
    last_index: Array
    slot_mappings: tuple[Array, ...]
    ids: Array | Tensor | None
    positions: Array | Tensor
    spans: Array | Tensor | None = None
    embeddings: Tensor | None = None
    ends: Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    targets: Array = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    num_decoding: int = 0
    lengths: tuple[int, ...] = ()
    whole_prompt: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the pieces."""
        tokens = self.ids if self.embeddings is None else self.embeddings
        assert tokens is not None
        return int(tokens.shape[0]) - self.num_decoding

    @property
    def num_pieces(self) -> int:
        return len(self.slots) - (self.num_decoding > 0)

    @property
    def piece_slots(self) -> list[int]:
        """Slots of the pieces."""
        return list(map(int, self.slots[-self.num_pieces :]))

    def on_device(self, device: torch.device) -> OnDevice:
        """Copy it to a device, with one transfer."""
        parts = [self.slots, self.cu_seqlens, self.last_index, self.ends, self.targets]
        per_token = {"ids": self.ids, "positions": self.positions, "spans": self.spans}
        on_host = {name: v for name, v in per_token.items() if isinstance(v, np.ndarray)}
        tensors = upload([*parts, *self.slot_mappings, *on_host.values()], device)
        slots, cu_seqlens, last_index, ends, targets = tensors[: len(parts)]
        rest = tensors[len(parts) :]
        count = len(self.slot_mappings)
        inputs = StepInputs(
            slots,
            **{**per_token, **dict(zip(on_host, rest[count:], strict=True))},  # type: ignore[arg-type]
            embeddings=self.embeddings,
            cu_seqlens=cu_seqlens,
            slot_mappings=tuple(rest[:count]),
            last_index=last_index,
            max_query_len=max(self.lengths),
            lengths=self.lengths,
            whole_prompt=self.whole_prompt,
            decoding=ends[: self.num_decoding] if self.num_decoding else None,
        )
        return OnDevice(inputs, ends, targets)


class Room(NamedTuple):
    """How much of everything the inputs of a graph hold; a graph has decoding rows or none."""

    tokens: int
    pieces: int
    decoding: int = 0
    scored: int = 0


class StaticInputs:
    """The inputs of a graph: the next step's are copied there, what is left becomes padding.

    Padding tokens belong to no row and are written nowhere; padding rows are empty.

    Args:
        num_tables: block tables of the layers.
        tokens_on_host: whether ids, positions and spans come from the host, with all the rest.
    """

    def __init__(
        self,
        room: Room,
        num_tables: int,
        device: torch.device,
        *,
        has_spans: bool,
        tokens_on_host: bool,
        whole_prompt: bool = False,
    ) -> None:
        self._room = room
        tokens, pieces, decoding, scored = room
        self._hole = hole = int(decoding > 0)
        all_tokens, all_rows = decoding + tokens, decoding + pieces
        self._arrays: Arrays = [
            np.empty(hole + pieces, dtype=np.int32),
            np.empty(hole + pieces + 1, dtype=np.int32),
            np.empty(all_rows + scored, dtype=np.int64),
            np.empty(all_rows, dtype=np.int32),
            np.empty(scored, dtype=np.int64),
            *(np.empty(all_tokens, dtype=np.int64) for _ in range(num_tables)),
        ]
        dtypes = {"ids": torch.int64, "positions": torch.int32, "spans": torch.int32}
        names = [name for name in dtypes if has_spans or name != "spans"]
        self._on_host: list[str] = names if tokens_on_host else []
        for name in self._on_host:
            dtype = np.int64 if name == "ids" else np.int32
            self._arrays.append(np.empty(all_tokens, dtype=dtype))
        self._starts = aligned_starts([a.nbytes // WORD for a in self._arrays])
        self._pins = device.type == "cuda"
        with torch.inference_mode(False):
            self._words = torch.zeros(self._starts[-1], dtype=torch.int32, device=device)
            views = cut_words(self._words, self._arrays, self._starts)
            slots, cu_seqlens, last_index, self.ends, self.targets = views[:5]
            rest = views[5:]
            per_token = dict(zip(self._on_host, rest[num_tables:], strict=True))
            for name in names:
                if name not in per_token:
                    per_token[name] = torch.zeros(all_tokens, dtype=dtypes[name], device=device)
            self.inputs = StepInputs(
                slots,
                **per_token,  # type: ignore[arg-type]
                cu_seqlens=cu_seqlens,
                slot_mappings=tuple(rest[:num_tables]),
                last_index=last_index,
                max_query_len=tokens,
                whole_prompt=whole_prompt,
                decoding=self.ends[:decoding] if hole else None,
            )

    def load(self, new: PromptInputs) -> None:
        """Copy the inputs of a step that has room here."""
        words = torch.empty(
            self._starts[-1], dtype=torch.int32, pin_memory=self._pins, device="cpu"
        )
        whole = words.numpy()
        host = [
            whole[start : start + array.nbytes // WORD].view(array.dtype)
            for array, start in zip(self._arrays, self._starts, strict=False)
        ]
        self._put_rows(host, new)
        first, count = self._room.decoding, new.num_decoding
        per_token = [(mapping, -1) for mapping in new.slot_mappings]
        per_token += [(getattr(new, name), _FILLS[name]) for name in self._on_host]
        for target, (values, fill) in zip(host[5:], per_token, strict=True):
            # The front, of the decoding rows, is written by the graph.
            target[:first] = fill
            _put(target[first:], values[count:], fill)
        self._words.copy_(words, non_blocking=True)
        for name in ("ids", "positions", "spans"):
            values = getattr(new, name)
            if isinstance(values, Tensor):
                target = getattr(self.inputs, name)
                target[: values.shape[0]].copy_(values)
                if values.shape[0] < target.shape[0]:
                    target[values.shape[0] :].fill_(_FILLS[name])

    def _put_rows(self, host: list[Array], new: PromptInputs) -> None:
        slots, cu_seqlens, last_index, ends, targets, *_ = host
        _, pieces, decoding, _ = self._room
        hole, count, num_pieces = self._hole, new.num_decoding, new.num_pieces
        shift, all_rows = decoding - count, decoding + pieces
        _put(slots, new.slots, -1)
        cu_seqlens[0] = 0
        # Padding rows begin and end where the last real one ends.
        _put(cu_seqlens[hole:], new.cu_seqlens[hole:] + shift, decoding + new.num_tokens)
        last_index[:decoding] = np.arange(decoding)
        last = new.last_index[count:] + shift
        _put(last_index[decoding:all_rows], last[:num_pieces], 0)
        _put(last_index[all_rows:], last[num_pieces:], 0)
        _put(ends[:decoding], new.ends[:count], -1)
        _put(ends[decoding:], new.ends[count:], -1)
        _put(targets, new.targets, 0)


_FILLS = {"ids": 0, "positions": 0, "spans": 1}


def _put(target: Array, values: Array, fill: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = fill


__all__ = ["OnDevice", "PromptInputs", "Room", "StaticInputs"]
