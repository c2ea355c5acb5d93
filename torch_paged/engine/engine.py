"""The serving loop: requests come and go while the others decode."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Hashable, Sequence

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.engine.core import EngineCore
from torch_paged.engine.job import Batch, Job, Row, StepRecord
from torch_paged.engine.launch import StepLauncher
from torch_paged.engine.output import RequestOutput
from torch_paged.engine.request import FinishReason, Request
from torch_paged.engine.scheduler import Scheduler
from torch_paged.engine.step import PrefillChunk, ScheduledStep
from torch_paged.engine.token_log import TokenLog
from torch_paged.engine.weights import PrefixGuard

logger = logging.getLogger("torch_paged")

# Steps that the log holds: a row's tokens are read from it in pieces of at most half of that.
_LOG_STEPS = 512


class ServingEngine:
    """Runs jobs on an `EngineCore`; not thread-safe, callers hold the model's lock.

    A step is scheduled and launched without knowing the tokens of the `lag` steps before. What
    the host does for it does not grow with the batch: reports are looked at as a whole, and the
    tokens of a row are read when it ends, or when somebody asks for them.

    Args:
        lag: steps launched ahead of the newest report that was read.
    """

    def __init__(self, core: EngineCore, *, lag: int | None = None) -> None:
        self._core = core
        self._config = core.config
        self._lag = core.config.lag if lag is None else lag
        self._jobs: dict[Hashable, Job] = {}  # all that have not ended
        self._active: dict[Hashable, Job] = {}  # those with a row
        self._watched: dict[Hashable, Job] = {}
        self._ended: list[Job] = []  # since the last `take_outputs`
        self._num_preempted_before = 0
        self._max_eos_ids = 0
        self._num_steps = 0
        self._known = -1  # newest step whose report was read
        self._next_flush = _LOG_STEPS // 2
        self._in_flight: deque[StepRecord] = deque()
        self._scheduler: Scheduler | None = None
        self._allocator: BlockAllocator | None = None
        self._log: TokenLog | None = None
        self._launcher: StepLauncher | None = None
        self._guard = PrefixGuard(core)
        self._is_stale = False  # a step was broken off: what runs must start again

    @property
    def core(self) -> EngineCore:
        return self._core

    @property
    def is_idle(self) -> bool:
        """Whether no job is left, and nothing is in flight."""
        return not self._jobs and not self._in_flight

    @property
    def num_running(self) -> int:
        return 0 if self._scheduler is None else self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._jobs) - len(self._active)

    @property
    def num_preemptions(self) -> int:
        """Requests sent back in line for lack of blocks."""
        now = 0 if self._scheduler is None else self._scheduler.num_preemptions
        return self._num_preempted_before + now

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt included."""
        return self._config.max_model_len or self._core.max_model_len

    def add(self, job: Job) -> None:
        """Put a job in line.

        Raises:
            ValueError: its id is in use.
        """
        request = job.request
        if request.request_id in self._jobs:
            raise ValueError(f"request_id {request.request_id!r} is in use; choose another")
        if not self._jobs:
            self._wake(len(job.params.eos_ids))
        self._max_eos_ids = max(self._max_eos_ids, len(job.params.eos_ids))
        self._jobs[request.request_id] = job
        if job.is_watched:
            self._watched[request.request_id] = job
        self._enter(job)

    def cancel(self, request_id: Hashable) -> None:
        """End a job now, with the tokens that are here; no effect if it has ended."""
        job = self._jobs.get(request_id)
        if job is not None:
            if job.row is not None:
                self._learn(job.row, self._known)
            self._complete(job, "cancelled")

    def weights_changed(self) -> None:
        """Forget cached prefixes; rows that run keep what they have."""
        self._guard.drop()

    def step(self) -> None:
        """Schedule and launch one step, then read the reports that are due."""
        if self.is_idle:
            return
        started = time.perf_counter()
        scheduler = self._ready()
        if scheduler.is_idle:
            self._collect(0)
        else:
            # Broken off below, the step would count as launched.
            self._is_stale = True
            scheduled = scheduler.schedule()
            step, self._num_steps = self._num_steps, self._num_steps + 1
            self._note_ends(scheduled.finished)
            launched = self._launch(scheduled, step)
            self._is_stale = False
            settle = scheduled.preempted or not launched
            self._collect(0 if settle else self._lag)
            self._put_back(scheduled.preempted, step)
        if self._known >= self._next_flush:
            self._flush()
        if self.is_idle:
            self._guard.rest()
        self._core.counters.seconds += time.perf_counter() - started

    def take_outputs(self, *, tokens: bool) -> tuple[list[RequestOutput], list[Hashable]]:
        """Return outputs since the last call, and the ids of the jobs that ended.

        Outputs are those of jobs that ended and, with `tokens`, of all that have new ones. Those
        of private jobs are left out.
        """
        ended, self._ended = self._ended, []
        outputs = [job.output(since=job.num_reported) for job in ended if not job.private]
        if tokens:
            for job in self._active.values():
                assert job.row is not None
                self._learn(job.row, self._known)
                count = len(job.request.output_ids)
                if count > job.num_reported and not job.private:
                    outputs.append(job.output(since=job.num_reported))
                    job.num_reported = count
        return outputs, [job.request.request_id for job in ended]

    def end_all(
        self, unseen: Sequence[Job], reason: FinishReason, error: str | None = None
    ) -> None:
        """End every job, and jobs that were never added, with the tokens that are here."""
        jobs = [*self.abandon(), *unseen]
        for job in jobs:
            self._complete(job, reason, error)

    def abandon(self) -> list[Job]:
        """Give slots and blocks back and return the unfinished jobs, for another engine to add.

        Tokens that are on their way are lost, and will be computed again.
        """
        jobs = list(self._jobs.values())
        self._withdraw()
        self._jobs.clear()
        self._watched.clear()
        return jobs

    def check_integrity(self) -> None:
        """Raise `TorchPagedError` if slots, blocks and counters contradict each other."""
        if self._scheduler is not None and self._core.is_prepared:
            self._scheduler.check_integrity()
            self._core.prefixes.check_integrity()

    # Binding to the core.

    def _wake(self, num_eos_ids: int) -> None:
        """Make ready for the first job after a pause: weights may have moved or changed."""
        self._max_eos_ids = max(num_eos_ids, self._max_eos_ids)
        self._prepare()
        self._guard.wake()

    def _prepare(self) -> None:
        spare = self._config.max_num_seqs - self.num_running
        self._core.prepare(spare, self.max_model_len, self._max_eos_ids)

    def _ready(self) -> Scheduler:
        """Return the scheduler, after what other users did to the core between two steps."""
        core = self._core
        lost = not core.is_prepared or core.allocator is not self._allocator
        if self._scheduler is None or lost or self._is_stale:
            self._restart()
        elif core.state.num_eos_ids < self._max_eos_ids:
            self._prepare()
        if self._log is None or self._log.state is not core.state:
            self._renew_log()
        assert self._scheduler is not None
        return self._scheduler

    def _restart(self) -> None:
        """Start every job again behind the tokens that are known."""
        self._withdraw()
        self._prepare()
        self._is_stale = False
        for job in self._jobs.values():
            self._enter(job)

    def _withdraw(self) -> None:
        """Leave the core as if nothing of ours had ever run there."""
        self._in_flight.clear()
        self._known = self._num_steps - 1
        scheduler = self._scheduler
        owned = self._core.is_prepared and self._core.allocator is self._allocator
        for job in self._jobs.values():
            # First, so that nobody reads tokens that are not here.
            if job.row is not None:
                job.row.is_done, job.row = True, None
            if scheduler is not None and owned:
                scheduler.finish(job.request.request_id, "error")
            job.request = _fresh(job.request)
        self._active.clear()
        if scheduler is not None:
            self._num_preempted_before += scheduler.num_preemptions
        self._scheduler = self._log = self._launcher = self._allocator = None

    def _enter(self, job: Job) -> None:
        """Hand a job to the scheduler."""
        if self._scheduler is None:
            self._scheduler = self._make_scheduler()
        self._guard.check(job.request)
        job.request.payload = job
        self._scheduler.add(job.request)

    def _make_scheduler(self) -> Scheduler:
        core, config = self._core, self._config
        self._allocator = core.allocator
        return Scheduler(
            core.allocator,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            policy="priority",
            # Off, requests have salts of their own: only samples of one prompt share blocks.
            enable_prefix_caching=True,
            prefix_cache=core.prefixes,
            make_room=core.make_room,
            slots=core.slots,
            learn=self._learn_request,
        )

    def _renew_log(self) -> None:
        """Read all reports of the old state, then take those of the present one."""
        if self._log is not None:
            self._collect(0)
            self._flush()
        state = self._core.state
        self._log = TokenLog(state, _LOG_STEPS, self._lag + 2)
        if self._launcher is None:
            self._launcher = StepLauncher(self._core, self._active)
        else:
            self._launcher.rebind()

    # Launching.

    def _launch(self, scheduled: ScheduledStep, step: int) -> bool:
        """Launch a step and say whether there was anything to launch."""
        launcher, log = self._launcher, self._log
        assert launcher is not None and log is not None
        launcher.update(scheduled)
        batch: Batch | None = None
        if scheduled.num_decoding:
            try:
                batch = launcher.decode()
            except Exception as error:
                self._fail_rows(launcher.rows, error)
        rows = self._prefill(launcher, scheduled.prefills, step)
        if batch is None and not scheduled.prefills:
            return False
        log.post(step)
        self._in_flight.append(StepRecord(step, batch, rows))
        counters = self._core.counters
        counters.steps += batch is not None
        counters.tokens += (0 if batch is None else len(batch.rows)) + len(rows)
        return True

    def _prefill(
        self, launcher: StepLauncher, chunks: Sequence[PrefillChunk], step: int
    ) -> tuple[Row, ...]:
        if not chunks:
            return ()
        try:
            launcher.prefill(chunks)
            done = list(chunks)
        except Exception as error:
            done = self._prefill_singly(launcher, chunks, error)
        rows = []
        for chunk in done:
            if chunk.is_last:
                job = _job_of(chunk.request)
                assert chunk.request.slot is not None
                job.row = Row(job, chunk.request.slot, step)
                self._active[chunk.request.request_id] = job
                rows.append(job.row)
        return tuple(rows)

    def _prefill_singly(
        self, launcher: StepLauncher, chunks: Sequence[PrefillChunk], error: Exception
    ) -> list[PrefillChunk]:
        """After a failure, find out whose it is; the others run."""
        assert self._scheduler is not None
        done: list[PrefillChunk] = []
        unwritten: set[int] = set()  # blocks that a failed chunk should have written
        for chunk in chunks:
            request = chunk.request
            if unwritten.intersection(request.block_ids):
                self._scheduler.recompute(request.request_id)
                continue
            try:
                if len(chunks) == 1:
                    raise error
                launcher.prefill([chunk])
                done.append(chunk)
            except Exception as own:
                unwritten.update(request.block_ids)
                self._fail(_job_of(request), own)
        return done

    def _fail_rows(self, rows: Sequence[Row], error: Exception) -> None:
        for row in rows:
            if not row.is_done:
                self._fail(row.job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        logger.error("request %r failed: %s", job.request.request_id, text)
        if job.row is not None:
            self._learn(job.row, self._known)
        self._complete(job, "error", text)

    # Reading reports.

    def _collect(self, lag: int) -> None:
        """Read reports until at most `lag` are on their way, and more if they are here."""
        log = self._log
        assert log is not None
        while self._in_flight:
            record = self._in_flight[0]
            if len(self._in_flight) <= lag and not log.is_here(record.step):
                return
            log.wait(record.step)
            self._in_flight.popleft()
            self._read(record, log)

    def _read(self, record: StepRecord, log: TokenLog) -> None:
        step, self._known = record.step, record.step
        ended = [row for row in record.started if log.has_ended(step, row.slot)]
        if record.batch is not None:
            rows = record.batch.rows
            ended += [rows[i] for i in log.any_ended(step, record.batch.index)]
        for row in ended:
            if not row.is_done:
                self._end_row(row, step, log)
        if self._watched:
            self._watch(step)

    def _end_row(self, row: Row, step: int, log: TokenLog) -> None:
        job = row.job
        if log.has_failed(step, row.slot):
            self._learn(row, step - 1)
            count = len(job.request.output_ids)
            self._complete(job, "error", f"the logits of token {count} are NaN")
            return
        self._learn(row, step)
        try:
            stopped = job.request.output_ids[-1] in job.params.eos_ids or _stops(job)
        except Exception as error:
            self._fail(job, error)
            return
        self._complete(job, "stop" if stopped else "length")

    def _watch(self, step: int) -> None:
        """Let stop checks and callbacks see the tokens up to a step."""
        for job in list(self._watched.values()):
            row = job.row
            if row is None or row.is_done or row.next_step > min(step, row.last_step):
                continue
            self._learn(row, step)
            try:
                if _stops(job):
                    self._complete(job, "stop")
                elif job.on_output is not None:
                    output = job.output(since=job.num_called)
                    job.num_called = len(job.request.output_ids)
                    job.on_output(output)
            except Exception as error:
                self._fail(job, error)

    def _learn_request(self, request: Request) -> None:
        row = _job_of(request).row
        if row is not None:
            self._learn(row, self._known)

    def _learn(self, row: Row, step: int) -> None:
        """Give a row's request its tokens up to a step."""
        last = min(step, row.last_step)
        if row.is_done or last < row.next_step:
            return
        assert self._log is not None
        job = row.job
        job.request.output_ids += self._log.tokens(row.slot, row.next_step, last)
        if job.logprobs is not None:
            job.logprobs += self._log.logprobs(row.slot, row.next_step, last)
        row.next_step = last + 1

    def _flush(self) -> None:
        """Read the tokens of all rows, before the log comes round to them."""
        for job in self._active.values():
            if job.row is not None:
                self._learn(job.row, self._known)
        self._next_flush = self._known + _LOG_STEPS // 2

    # Ends.

    def _note_ends(self, requests: Sequence[Request]) -> None:
        for request in requests:
            job = _job_of(request)
            # A length limit ends a request when its last step is launched: that is not here yet.
            if job.finish_reason is None and request.finish_reason in ("cancelled", "error"):
                self._complete(job, request.finish_reason, request.error)

    def _put_back(self, requests: Sequence[Request], step: int) -> None:
        """Take leave of the rows of preempted requests, whose reports have all been read."""
        for request in requests:
            job = _job_of(request)
            row, job.row = job.row, None
            self._active.pop(request.request_id, None)
            if row is not None and not row.is_done:
                row.last_step = step - 1
                self._learn(row, row.last_step)
                row.is_done = True

    def _complete(self, job: Job, reason: FinishReason, error: str | None = None) -> None:
        request = job.request
        if job.row is not None:
            job.row.is_done, job.row = True, None
        if self._scheduler is not None:
            self._scheduler.finish(request.request_id, reason, error)
        job.finish_reason, request.error = reason, error
        self._jobs.pop(request.request_id, None)
        self._active.pop(request.request_id, None)
        self._watched.pop(request.request_id, None)
        self._ended.append(job)
        if job.on_output is not None:
            try:
                job.on_output(job.output(since=job.num_called))
            except Exception as failure:
                logger.exception("the callback of request %r raised", request.request_id)
                job.finish_reason = "error"
                request.error = f"{type(failure).__name__}: {failure}"


def _job_of(request: Request) -> Job:
    assert isinstance(request.payload, Job)
    return request.payload


def _stops(job: Job) -> bool:
    check, request = job.params.stop_check, job.request
    return check is not None and check(request.prompt_ids or (), request.output_ids)


def _fresh(request: Request) -> Request:
    """Return the same request as one that the scheduler has never seen."""
    return Request(
        request.request_id,
        request.prompt_ids,
        request.max_new_tokens,
        priority=request.priority,
        deadline=request.deadline,
        cache_salt=request.cache_salt,
        output_ids=request.output_ids,
        num_output_tokens=len(request.output_ids),
    )


__all__ = ["ServingEngine"]
