"""What a mask function of transformers lets a query see, in the only forms we serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_paged.patches.refusal import SpecRefusal

# Query positions to ask about: near the start, and two neighbours past every window in use, so
# that attention in chunks shows by its moving start.
_QUERIES = (0, 1, 3, 4096, 1 << 18, (1 << 18) + 1)


def window_of(mask_function: Callable[..., Any]) -> int:
    """Return the window of causal attention, 0 for none.

    Args:
        mask_function: ``(row, head, query, key) -> bool`` over index tensors.

    Raises:
        SpecRefusal: it shows anything but the newest keys up to the query.
    """
    counts = [_num_visible(mask_function, query) for query in _QUERIES]
    widest = counts[-1]
    if counts != [min(query + 1, widest) for query in _QUERIES]:
        raise SpecRefusal("its masks are neither causal nor a window")
    return 0 if widest == _QUERIES[-1] + 1 else widest


def _num_visible(mask_function: Callable[..., Any], query: int) -> int:
    """Count the keys that `query` sees; they must be the newest ones up to itself."""
    zero = torch.zeros((), dtype=torch.long, device="cpu")
    keys = torch.arange(query + 3, device="cpu")
    seen = torch.as_tensor(mask_function(zero, zero, torch.tensor(query, device="cpu"), keys))
    seen = seen.expand(keys.shape)
    count = int(seen.sum())
    if not bool(seen[query + 1 - count : query + 1].all()) or bool(seen[query + 1 :].any()):
        raise SpecRefusal("its masks are neither causal nor a window")
    return count
