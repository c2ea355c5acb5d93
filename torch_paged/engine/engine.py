"""The serving loop: requests come and go while the others decode."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.config import MAX_MODEL_LEN
from torch_paged.engine.core import EngineCore
from torch_paged.engine.host_swap import HostSwap
from torch_paged.engine.job import Job
from torch_paged.engine.job_launch import JobLauncher
from torch_paged.engine.launch import StepLauncher
from torch_paged.engine.ledger import Ledger, job_of
from torch_paged.engine.output import RequestOutput
from torch_paged.engine.request import FinishReason, Request
from torch_paged.engine.scheduler import Scheduler
from torch_paged.engine.step import ScheduledStep
from torch_paged.engine.token_log import TokenLog
from torch_paged.engine.uninterrupted import uninterrupted
from torch_paged.engine.weights import PrefixGuard

# Steps that the log holds: a row's tokens are read from it in pieces of about half of that.
_LOG_STEPS = 512
# Rows get the blocks of so many steps at once, 1.6 us a row. More steps waste blocks: of
# those that ragged work holds 3.3% are empty with 48 steps, 3.9% with 64.
_STEPS_AHEAD = 48


class ServingEngine:
    """Runs jobs on an `EngineCore`; not thread-safe, callers hold the model's lock.

    A step is scheduled and launched without knowing the tokens of the `Config.lag` steps before.
    What the host does for it does not grow with the batch.

    Args:
        host_bytes: most host memory that the core may hold for preempted requests; None: what the
            configuration says.

    Attributes:
        mixes: rows that decode share a forward with the chunks of their step; see
            `engine.prompt_graphs` for what that saves.
    """

    mixes = True

    def __init__(self, core: EngineCore, host_bytes: int | None = None) -> None:
        asked, limit = core.config.max_model_len, core.step.max_positions
        if limit and asked is not None and asked > limit:
            raise ValueError(
                f"max_model_len must be at most {limit}, the number of positions that the model "
                f"has, got {asked}; lower it"
            )
        self._core = core
        self._config = core.config
        self._host_bytes = core.config.host_bytes if host_bytes is None else host_bytes
        self._ledger = Ledger(self._end_request)
        self._guard = PrefixGuard(core)
        self._num_steps = 0
        self._num_preempted_before = 0
        self._max_eos_ids = 0
        self._longest = 0  # tokens that a job which outgrows the core may come to
        self._is_stale = False  # a step was broken off: what runs must start again
        # Made when they are needed, and again when the core has lost its memory.
        self._scheduler: Scheduler | None = None
        self._launcher: StepLauncher | None = None
        self._swap: HostSwap | None = None
        self._allocator: BlockAllocator | None = None

    @property
    def core(self) -> EngineCore:
        return self._core

    @property
    def is_idle(self) -> bool:
        """Whether no job is left, and nothing is in flight."""
        return self._ledger.is_idle

    @property
    def num_running(self) -> int:
        """Jobs with a slot."""
        return 0 if self._scheduler is None else self._scheduler.num_running

    @property
    def is_starved(self) -> bool:
        """Whether the newest step ran nothing because others hold all that is missing."""
        return not self.is_idle and self._scheduler is not None and self._scheduler.is_starved

    @property
    def num_preemptions(self) -> int:
        """Requests sent back in line for lack of blocks."""
        now = 0 if self._scheduler is None else self._scheduler.num_preemptions
        return self._num_preempted_before + now

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of running jobs in the KV cache, after all steps launched so far."""
        scheduler = self._scheduler
        jobs = self._ledger.jobs.values()
        return (
            0
            if scheduler is None
            else sum(
                scheduler.num_computed_tokens(job.request)
                for job in jobs
                if job.request.slot is not None
            )
        )

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt included."""
        return self._config.max_model_len or max(self._core.max_model_len, self._longest)

    def add(self, job: Job) -> None:
        """Put a job in line; what prevents that becomes its error.

        Broken off by an interrupt, it leaves the job as it was, and may be called again.

        Raises:
            ValueError: its id is in use.
        """
        request_id = job.request.request_id
        if job.finish_reason is not None or self._ledger.jobs.get(request_id) is job:
            return  # an interrupt came after the job was in
        if request_id in self._ledger.jobs:
            raise ValueError(f"request_id {request_id!r} is in use; choose another")
        try:
            self._admit(job)
        except BaseException:
            if job.finish_reason is None:
                # The scheduler may know the request, or half of it.
                self._is_stale = True
                self._ledger.forget(job)
                job.request = _fresh(job.request)
            raise

    def _admit(self, job: Job) -> None:
        is_first = not self._ledger.jobs
        self._max_eos_ids = max(self._max_eos_ids, len(job.params.eos_ids))
        self._ledger.admit(job)
        try:
            if is_first:
                # Weights may have moved or changed since the last job.
                self._prepare()
                self._guard.wake()
            self._make_long_enough(job)
            if not self._is_stale:  # otherwise the next step lets all jobs enter
                self._enter(job)
        except Exception as error:
            self._ledger.fail(job, error)

    def cancel(self, request_id: Hashable, why: str | None = None) -> None:
        """End a job now, with the tokens that are here; no effect if it has ended."""
        job = self._ledger.jobs.get(request_id)
        if job is not None:
            self._ledger.learn(job.request)
            self._ledger.complete(job, "cancelled", why)

    def weights_changed(self) -> None:
        """Forget cached prefixes; rows that run keep what they have."""
        self._guard.drop()

    def step(self) -> None:
        """Schedule and launch one step, then read the reports that are due."""
        if self.is_idle:
            return
        started = time.perf_counter()
        self._ledger.resume()
        scheduler = self._ready()
        if scheduler.is_idle:
            self._ledger.collect(0)
        else:
            # Broken off below, the step would count as launched.
            self._is_stale = True
            if self._num_steps % _STEPS_AHEAD == 0:
                self._grow_ahead(scheduler)
            with uninterrupted:
                scheduled = scheduler.schedule()
            self._swap_blocks(scheduled)
            step, self._num_steps = self._num_steps, self._num_steps + 1
            self._note_ends(scheduled.finished)
            self._ledger.stop_rows(scheduled.preempted, step)
            launched = self._launch(scheduled, step)
            self._is_stale = False
            settle = scheduled.preempted or not launched
            self._ledger.collect(0 if settle else self._config.lag)
            self._ledger.put_back()
        if self.is_idle:
            self._guard.rest()
        self._core.counters.seconds += time.perf_counter() - started

    def take_outputs(self, *, tokens: bool) -> tuple[list[RequestOutput], list[Hashable]]:
        """Return outputs since the last call, and the ids of the jobs that ended.

        Outputs are those of jobs that ended and, with `tokens`, of all that have new ones. Those
        of private jobs are left out.
        """
        return self._ledger.take_outputs(tokens=tokens)

    def abandon(self) -> list[Job]:
        """Give slots and blocks back and return the unfinished jobs, for another engine to add.

        Tokens that are on their way are lost, and will be computed again.
        """
        jobs = self._withdraw()
        self._ledger = Ledger(self._end_request)
        return jobs

    def end_all(
        self, unseen: Sequence[Job], reason: FinishReason, error: str | None = None
    ) -> None:
        """End every job, and jobs that were never added, with the tokens that are here."""
        for job in [*self._withdraw(), *unseen]:
            self._ledger.complete(job, reason, error)

    def check_integrity(self) -> None:
        """Raise `TorchPagedError` if slots, blocks and counters contradict each other."""
        # Where a step was broken off the next one begins anew, whatever is left of this one.
        if self._scheduler is not None and not self._is_stale and self._owns_blocks():
            self._scheduler.check_integrity()
            self._core.prefixes.check_integrity()

    def _owns_blocks(self) -> bool:
        return self._core.is_prepared and self._core.allocator is self._allocator

    def _end_request(self, request_id: Hashable, reason: FinishReason, error: str | None) -> None:
        if self._scheduler is not None:
            self._scheduler.finish(request_id, reason, error)

    def _prepare(self) -> None:
        spare = self._config.max_num_seqs - self.num_running
        self._core.prepare(spare, self.max_model_len, self._max_eos_ids)

    def _make_long_enough(self, job: Job) -> None:
        """Raise the limit for a job that may outgrow it, and that has a limit of its own."""
        if not job.outgrows:
            return
        request = job.request
        wanted = request.num_prompt_tokens + request.max_new_tokens
        if wanted > MAX_MODEL_LEN:
            # Whatever others have raised the limit to.
            left = self._core.max_model_len - request.num_prompt_tokens
            request.max_new_tokens = max(left, 1)
        elif wanted > self.max_model_len:
            # In few steps: each widens the block tables.
            self._longest = min(1 << (wanted - 1).bit_length(), MAX_MODEL_LEN)
            if self._scheduler is not None:
                self._scheduler.raise_max_model_len(self.max_model_len)

    def _ready(self) -> Scheduler:
        """Return the scheduler, after what other users did to the core between two steps."""
        core = self._core
        if self._scheduler is None or self._is_stale or not self._owns_blocks():
            jobs = self._withdraw()
            self._prepare()
            self._is_stale = False
            for job in jobs:
                self._enter(job)
        elif core.state.num_eos_ids < self._max_eos_ids or (
            self._longest > core.state.max_blocks * self._config.block_size
        ):
            self._prepare()
        if self._launcher is None:
            self._launcher = StepLauncher(core, self._ledger.active)
        log = self._ledger.log
        if log is None or log.state is not core.state:
            depth = self._config.lag + 2
            self._ledger.use_log(TokenLog(core.state, _LOG_STEPS, depth, core.sampling.tops))
            self._launcher.rebind()
        assert self._scheduler is not None
        return self._scheduler

    def _withdraw(self) -> list[Job]:
        """Leave the core as if nothing of ours ran there; return the jobs, ready to start again.

        They keep the tokens that are known.
        """
        jobs = self._ledger.forget_rows(self._num_steps)
        scheduler = self._scheduler
        with uninterrupted:
            if scheduler is not None:
                self._num_preempted_before += scheduler.num_preemptions
            for job in jobs:
                if scheduler is not None and self._owns_blocks():
                    scheduler.finish(job.request.request_id, "error")
                job.request = _fresh(job.request)
            self._scheduler = self._launcher = self._swap = self._allocator = None
        return jobs

    def _enter(self, job: Job) -> None:
        """Hand a job to the scheduler."""
        if self._scheduler is None:
            self._scheduler = self._make_scheduler()
        self._guard.check(job.request)
        with uninterrupted:
            self._scheduler.add(job.request)

    def _make_scheduler(self) -> Scheduler:
        core, config = self._core, self._config
        self._allocator = core.allocator
        # A state is not in the blocks: such requests are computed again.
        if self._host_bytes and not core.step.keeps_state:
            self._swap = HostSwap(core, self._host_bytes)
        return Scheduler(
            core.allocator,
            block_size=config.block_size,
            kinds=core.layout.kinds,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            policy="priority",
            # Where it is off, salts see to it that only samples of one prompt share blocks.
            enable_prefix_caching=not core.step.keeps_state,
            prefix_cache=core.prefixes,
            cuts_prompts=not core.step.keeps_state,
            swap_space=self._swap,
            make_room=core.make_room,
            slots=core.slots,
            learn=self._ledger.learn,
            progress=lambda: core.progress,
        )

    def _grow_ahead(self, scheduler: Scheduler) -> None:
        """Give every row the blocks of its next steps at once, where there are plenty."""
        core = self._core
        columns = scheduler.num_running * -(-_STEPS_AHEAD // self._config.block_size)
        if columns * core.layout.num_tables <= core.allocator.num_free // 2:
            with uninterrupted:
                updates = scheduler.ensure_decode_blocks(_STEPS_AHEAD)
            core.state.write_blocks(updates)

    def _swap_blocks(self, scheduled: ScheduledStep) -> None:
        """Copy blocks to the host and back, before a callback can use what they leave behind."""
        counters = self._core.counters
        counters.preemptions += len(scheduled.preempted)
        counters.swaps += len(scheduled.swap_outs)
        if scheduled.swap_outs or scheduled.swap_ins:
            assert self._swap is not None
            self._swap.copy(scheduled)

    def _note_ends(self, requests: Sequence[Request]) -> None:
        for request in requests:
            job = job_of(request)
            # A length limit ends a request when its last step is launched: that is not here yet.
            if job.finish_reason is None and request.finish_reason in ("cancelled", "error"):
                self._ledger.complete(job, request.finish_reason, request.error)

    def _launch(self, scheduled: ScheduledStep, step: int) -> bool:
        """Launch a step and say whether there was anything to launch."""
        assert self._launcher is not None and self._scheduler is not None
        launcher = JobLauncher(self._launcher, self._ledger, self._scheduler.recompute)
        record = launcher.launch(scheduled, step, mixes=self.mixes)
        if record is None:
            return False
        self._ledger.post(record)
        batch, counters = record.batch, self._core.counters
        counters.launches += 1
        counters.steps += batch is not None
        counters.tokens += (0 if batch is None else len(batch.rows)) + len(record.started)
        return True


def _fresh(request: Request) -> Request:
    """Return the same request as one that the scheduler has never seen."""
    return Request(
        request.request_id,
        request.prompt_ids,
        request.max_new_tokens,
        priority=request.priority,
        deadline=request.deadline,
        cache_salt=request.cache_salt,
        max_cached_tokens=request.max_cached_tokens,
        output_ids=request.output_ids,
        num_output_tokens=len(request.output_ids),
        payload=request.payload,
    )


__all__ = ["ServingEngine"]
