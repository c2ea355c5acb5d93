"""An attention mask of a call: what the host has to know of it, read in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_paged.decoder.transfer import to_device


class MaskFacts(NamedTuple):
    """What is read of a mask [rows, columns].

    Attributes:
        real: where it has tokens, on the device of the mask.
        on_host: the same on the host.
        lengths: tokens of each row.
        right_padded: whether a row with tokens ends with padding.
        holed: whether there is padding behind a token of its row.
    """

    real: Tensor
    on_host: Tensor
    lengths: tuple[int, ...]
    right_padded: bool
    holed: bool

    def of_rows(self, rows: Sequence[int]) -> MaskFacts:
        """Return what is known of some of the rows."""
        index = torch.tensor(rows, device="cpu")
        real = self.real.index_select(0, to_device(index, self.real.device))
        return _facts(real, self.on_host.index_select(0, index))


def read_mask(mask: Tensor) -> MaskFacts:
    """Read a mask; waits for the device, once."""
    real = mask != 0
    return _facts(real, real.cpu())


def _facts(real: Tensor, host: Tensor) -> MaskFacts:
    lengths = tuple(host.sum(-1).tolist())
    holed = right_padded = False
    if sum(lengths) != host.numel():
        holed = bool((host[:, 1:] < host[:, :-1]).any())
        right_padded = bool((host.any(-1) & ~host[:, -1]).any())
    return MaskFacts(real, host, lengths, right_padded, holed)


def real_columns(mask: Tensor | None, device: torch.device) -> Tensor | None:
    """Return where a mask has tokens, [rows, columns]; None where they are everywhere."""
    if mask is None:
        return None
    return with_last(mask.to(device) != 0)


def with_last(real: Tensor) -> Tensor:
    """Return where rows have tokens; one that is all padding gives an answer by its last."""
    real = real.clone()
    real[:, -1] |= ~real.any(-1)
    return real


__all__ = ["MaskFacts", "read_mask", "real_columns", "with_last"]
