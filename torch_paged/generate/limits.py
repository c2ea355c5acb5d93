"""When the rows of a call end, as its stopping criteria say; nothing waits for the device."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch_paged.patches import seams


class Limits(NamedTuple):
    """What is known of the end of a call.

    Attributes:
        max_new_tokens: from the length criterion; None without one.
        eos_ids: ids that end a row; None where no criterion knows end tokens.
    """

    max_new_tokens: int | None
    eos_ids: tuple[int, ...] | None


def read_limits(criteria: Any, config: Any, width: int) -> Limits:
    """Read the criteria of a call.

    Args:
        config: that `generate` made the criteria by.
        width: columns of input_ids.
    """
    max_length, eos = None, None
    for criterion in criteria:
        if type(criterion) is seams.MaxLengthCriteria:
            limit = criterion.max_length
            max_length = limit if max_length is None else min(max_length, limit)
        elif type(criterion) is seams.EosTokenCriteria:
            eos = (eos or ()) + seams.end_tokens(criterion, config)
    if max_length is None or not math.isfinite(max_length):
        return Limits(None, eos)
    return Limits(max(math.ceil(max_length) - width, 1), eos)


__all__ = ["Limits", "read_limits"]
