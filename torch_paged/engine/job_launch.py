"""Launching a scheduled step: what fails ends the jobs whose fault it is, and no others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence

from torch_paged.engine.job import Batch, Row, StepRecord
from torch_paged.engine.launch import StepLauncher
from torch_paged.engine.ledger import Ledger, job_of
from torch_paged.engine.step import PrefillChunk, ScheduledStep

logger = logging.getLogger("torch_paged")


class JobLauncher:
    """Launches steps of jobs, and lets the ledger know who starts and who fails.

    Args:
        recompute: sends a request back in line whose prefill could not run.
    """

    def __init__(
        self, launcher: StepLauncher, ledger: Ledger, recompute: Callable[[Hashable], None]
    ) -> None:
        self._launcher = launcher
        self._ledger = ledger
        self._recompute = recompute

    def launch(self, scheduled: ScheduledStep, step: int, *, mixes: bool) -> StepRecord | None:
        """Launch a step; None if there was nothing to launch.

        Args:
            mixes: rows that decode may share a forward with chunks.
        """
        launcher, chunks = self._launcher, scheduled.prefills
        launcher.update(scheduled)
        batch = None
        if mixes and scheduled.num_decoding and chunks and launcher.mixes(chunks):
            batch = self._mix(chunks)
        if batch is not None:
            rows = self._started(chunks, step)
        else:
            if scheduled.num_decoding:
                batch = self._decode()
            rows = self._prefill(chunks, step)
        if batch is None and not chunks:
            return None
        return StepRecord(step, batch, rows, launcher.num_tops)

    def _mix(self, chunks: Sequence[PrefillChunk]) -> Batch | None:
        """Launch decoding rows and chunks in one forward; None where that fails."""
        try:
            return self._launcher.mixed(chunks)
        except Exception as error:
            # Launched apart, it shows whose error it is.
            logger.debug("a step of rows and chunks together failed: %s", error)
            return None

    def _decode(self) -> Batch | None:
        """Launch a token of every row; a failure is that of all of them."""
        try:
            return self._launcher.decode()
        except Exception as error:
            for row in self._launcher.rows:
                if not row.is_done:
                    self._ledger.fail(row.job, error)
        return None

    def _prefill(self, chunks: Sequence[PrefillChunk], step: int) -> tuple[Row, ...]:
        """Launch chunks; return the rows that sample their first token."""
        if not chunks:
            return ()
        try:
            self._launcher.prefill(chunks)
        except Exception as error:
            chunks = self._prefill_singly(chunks, error)
        return self._started(chunks, step)

    def _started(self, chunks: Sequence[PrefillChunk], step: int) -> tuple[Row, ...]:
        """Return the rows whose first token was sampled behind launched chunks."""
        return tuple(
            self._ledger.start(job_of(chunk.request), chunk.request.slot, step)
            for chunk in chunks
            if chunk.is_last and chunk.request.slot is not None
        )

    def _prefill_singly(
        self, chunks: Sequence[PrefillChunk], error: Exception
    ) -> list[PrefillChunk]:
        """After a failure, find out whose it is; return the chunks that ran."""
        done: list[PrefillChunk] = []
        unwritten: set[int] = set()  # blocks that a failed chunk should have written
        for chunk in chunks:
            request = chunk.request
            if unwritten.intersection(request.block_ids):
                self._recompute(request.request_id)
                continue
            try:
                if len(chunks) == 1:
                    raise error
                self._launcher.prefill([chunk])
                done.append(chunk)
            except Exception as own:
                unwritten.update(request.block_ids)
                self._ledger.fail(job_of(request), own)
        return done


__all__ = ["JobLauncher"]
