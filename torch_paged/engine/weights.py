"""Cached prefixes belong to the weights that computed them: noticing that these changed."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_paged.cache.prefix import block_keys
from torch_paged.engine.core import EngineCore
from torch_paged.engine.request import Request
from torch_paged.ops.checksum import ROW_WORDS, add_to_checksum, as_words


class PrefixGuard:
    """Drops cached prefixes when the weights are not the ones that computed them.

    While jobs run, a write to a parameter is noticed by its version counter, which writes through
    ``.data`` evade. Across a pause a checksum over all weights decides, and only when a request
    would reuse something from before.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._versions: tuple[int, ...] = ()  # of the adapters' state, of each tensor
        self._checksum: Tensor | None = None  # of the weights at the last rest
        self._is_trusted = True  # what the cache holds belongs to the present weights

    def wake(self) -> None:
        """Begin a busy period: what the cache holds from before is in doubt."""
        versions = self._read_versions()
        if versions != self._versions:
            self.drop()
        self._versions = versions
        self._is_trusted = not self._core.has_prefixes

    def check(self, request: Request) -> None:
        """Verify the cache if this request would find something in it."""
        if self._is_trusted or request.prompt_ids is None:
            return
        size = self._core.config.block_size
        if len(request.prompt_ids) <= size or not self._core.has_prefixes:
            return
        first = block_keys(request.prompt_ids[:size], size, salt=request.cache_salt)
        if not self._core.prefixes.lookup(first):
            return
        if self._checksum is None or not torch.equal(self._checksum, self._sum()):
            self.drop()
        self._is_trusted = True

    def rest(self) -> None:
        """End a busy period; nothing waits for the device."""
        if not self._core.is_prepared or not self._core.has_prefixes:
            return
        if self._read_versions() != self._versions:
            self.drop()
            self._versions = self._read_versions()
        elif self._is_trusted or self._checksum is None:
            self._checksum = self._sum()

    def drop(self) -> None:
        """Forget all cached prefixes."""
        if self._core.is_prepared:
            self._core.prefixes.reset()
        self._checksum = None

    def _read_versions(self) -> tuple[int, ...]:
        step = self._core.step
        return (step.variant, *(t._version for t in step.tensors() if not t.is_inference()))

    def _sum(self) -> Tensor:
        graphs = self._core.graphs
        if graphs is None:
            return self._launch_sum()
        # One launch instead of hundreds. Graphs go when a parameter moves.
        static = graphs.run("checksum", self._launch_sum, warmup=self._launch_sum)
        assert static is not None
        return static.clone()

    def _launch_sum(self) -> Tensor:
        checksum = torch.zeros(1, dtype=torch.int64, device=self._core.device)
        first_row = 0
        for tensor in self._core.step.tensors():
            words = as_words(tensor)
            add_to_checksum(words, checksum, first_row=first_row)
            first_row += words.shape[0] // ROW_WORDS + 1
        return checksum


__all__ = ["PrefixGuard"]
