"""The jobs of an engine, and what is known of their tokens."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from torch_paged.engine.job import Job, Row, StepRecord
from torch_paged.engine.output import RequestOutput, RunningOutput
from torch_paged.engine.request import FinishReason, Request
from torch_paged.engine.token_log import TokenLog
from torch_paged.engine.uninterrupted import uninterrupted

logger = logging.getLogger("torch_paged")

EndRequest = Callable[[Hashable, FinishReason, "str | None"], None]


class Ledger:
    """Read the reports of launched steps, in order, and give jobs their tokens and their ends.

    A report is looked at as a whole. The tokens of a row are read when it ends, when somebody
    asks for them, and before the log comes round to them.

    Args:
        end_request: tells the scheduler that a request has ended; no effect if it knows.

    Attributes:
        jobs: all that have not ended.
        active: those with a row.
        known: newest step whose report was read.
    """

    def __init__(self, end_request: EndRequest) -> None:
        self.jobs: dict[Hashable, Job] = {}
        self.active: dict[Hashable, Job] = {}
        self.known = -1
        self._end_request = end_request
        self._watched: dict[Hashable, Job] = {}
        self._ended: list[Job] = []  # since the last `take_outputs`
        self._in_flight: deque[StepRecord] = deque()
        self._is_reading = False  # also after a callback broke off with an interrupt
        self._stopped: list[Request] = []  # preempted, until all reports have been read
        self._log: TokenLog | None = None
        self._flushed = -1  # the newest step up to which all tokens were read

    @property
    def log(self) -> TokenLog | None:
        """Where the reports of launched steps arrive."""
        return self._log

    @property
    def is_idle(self) -> bool:
        """Whether no job is left, and nothing is in flight."""
        return not self.jobs and not self._in_flight

    def admit(self, job: Job) -> None:
        """Take in a job."""
        job.request.payload = job
        self.jobs[job.request.request_id] = job
        if job.is_watched:
            self._watched[job.request.request_id] = job

    def forget(self, job: Job) -> None:
        """Undo `admit`, also where that was broken off."""
        for jobs in (self.jobs, self._watched):
            jobs.pop(job.request.request_id, None)

    def start(self, job: Job, slot: int, step: int) -> Row:
        """Note that a job samples a token in `step` and in each one that follows."""
        is_plain = not job.is_watched and job.logprobs is None
        row = Row(job, job.request.output_ids, slot, step, step, is_plain=is_plain)
        with uninterrupted:
            job.row = row
            self.active[job.request.request_id] = job
        return row

    def use_log(self, log: TokenLog) -> None:
        """Take reports from another log, after reading all of the old one."""
        if self._log is not None:
            self.collect(0)
            self.flush()
        self._log = log

    def post(self, record: StepRecord) -> None:
        """Note a launched step and have its report sent."""
        assert self._log is not None
        self._log.post(record.step, record.num_tops)
        self._in_flight.append(record)

    def collect(self, lag: int) -> None:
        """Read reports until at most `lag` are on their way, and more if they are here."""
        while self._in_flight:
            assert self._log is not None
            record = self._in_flight[0]
            if len(self._in_flight) <= lag and not self._log.is_here(record.step):
                return
            self._log.wait(record.step)
            # Broken off by an interrupt it stays in flight, and is read again for whoever is left.
            self._is_reading = True
            try:
                self._read(record, self._log)
            except Exception:
                self._finish_reading(record)
                raise
            self._finish_reading(record)
        if self._log is not None and self.known - self._flushed >= self._log.num_safe_steps:
            self.flush()

    def resume(self) -> None:
        """Do what is left of reading reports, where an interrupt in a callback broke it off."""
        if self._is_reading or self._stopped:
            self.collect(0)
            self.put_back()

    def forget_rows(self, num_steps: int) -> list[Job]:
        """Drop all rows and what is in flight; return the jobs, which have to start again.

        Args:
            num_steps: launched so far.
        """
        self.resume()
        self.flush()
        with uninterrupted:
            self._in_flight.clear()
            self.known = num_steps - 1
            for job in self.active.values():
                if job.row is not None:
                    job.row.is_done, job.row = True, None
            self.active.clear()
            self._log = None
        return list(self.jobs.values())

    def stop_rows(self, requests: Sequence[Request], step: int) -> None:
        """Note that rows preempted in `step` have no token of it, before its report is read."""
        for request in requests:
            row = job_of(request).row
            if row is not None:
                row.last_step = step - 1
        self._stopped += requests

    def put_back(self) -> None:
        """Take leave of rows that were stopped, after all reports have been read."""
        while self._stopped:
            with uninterrupted:
                job = job_of(request := self._stopped.pop())
                row, job.row = job.row, None
                self.active.pop(request.request_id, None)
                if row is not None and not row.is_done:
                    self._learn(row, row.last_step)
                    row.is_done = True

    def learn(self, request: Request) -> None:
        """Bring the tokens of a request up to what is known."""
        row = job_of(request).row
        if row is not None:
            self._learn(row, self.known)

    def flush(self) -> None:
        """Read the tokens of all rows, before the log comes round to them."""
        if self._log is not None:
            with uninterrupted:
                self._flush(self._log)

    def _flush(self, log: TokenLog) -> None:
        known = self.known
        rows = [job.row for job in self.active.values() if job.row is not None]
        plain = [row for row in rows if row.is_plain and row.next_step <= known <= row.last_step]
        if plain:
            first = min(row.next_step for row in plain)
            columns = log.columns([row.slot for row in plain], first, known)
            for row, tokens in zip(plain, columns, strict=True):
                row.output_ids += tokens[row.next_step - first :]
                row.next_step = known + 1
        for row in rows:
            self._learn(row, known)
        self._flushed = known

    def fail(self, job: Job, error: Exception) -> None:
        """End a job because of an exception."""
        text = f"{type(error).__name__}: {error}"
        logger.error("request %r failed: %s", job.request.request_id, text)
        self.learn(job.request)
        self.complete(job, "error", text)

    def complete(self, job: Job, reason: FinishReason, error: str | None = None) -> None:
        """End a job with the tokens that it has."""
        request = job.request
        with uninterrupted:
            if job.row is not None:
                job.row.is_done, job.row = True, None
            self._end_request(request.request_id, reason, error)
            job.finish_reason, request.error = reason, error
            for jobs in (self.jobs, self.active, self._watched):
                jobs.pop(request.request_id, None)
            self._ended.append(job)
        if job.on_output is not None:
            try:
                job.on_output(job.output(since=job.num_called))
            except Exception as failure:
                logger.exception("the callback of request %r raised", request.request_id)
                job.finish_reason = "error"
                request.error = f"{type(failure).__name__}: {failure}"

    def take_outputs(self, *, tokens: bool) -> tuple[list[RequestOutput], list[Hashable]]:
        """Return outputs since the last call, and the ids of the jobs that ended.

        Outputs are those of jobs that ended and, with `tokens`, of all that have new ones. Those
        of private jobs are left out.
        """
        ended, self._ended = self._ended, []
        outputs = [job.output(since=job.num_reported) for job in ended if not job.private]
        if tokens:
            self._add_running(outputs)
        return outputs, [job.request.request_id for job in ended]

    def _add_running(self, outputs: list[RequestOutput]) -> None:
        """Add an output of each job that goes on and has new tokens."""
        known, log = self.known, self._log
        tokens = [] if log is None else log.all_tokens(known)
        for job in self.active.values():
            row = job.row
            assert row is not None
            if row.next_step == known and row.is_plain:
                # What `_learn` does, for the one step that is new to most rows.
                row.output_ids.append(tokens[row.slot])
                row.next_step = known + 1
            elif row.next_step <= known:
                self._learn(row, known)
            items, since = row.output_ids, job.num_reported
            count = len(items)
            if count > since and not job.private:
                request = job.request
                outputs.append(
                    RunningOutput(
                        request.request_id,
                        request.prompt_ids,
                        items,
                        since,
                        count,
                        job.logprobs,
                        job.tops,
                        job.prompt_scores,
                    )
                )
                job.num_reported = count

    def _finish_reading(self, record: StepRecord) -> None:
        self._is_reading = False
        # A callback that closed the engine has brought this to its end.
        if self._in_flight and self._in_flight[0] is record:
            self._in_flight.popleft()

    def _read(self, record: StepRecord, log: TokenLog) -> None:
        step, self.known = record.step, record.step
        for row in record.started:
            # What was copied before the report of the step has arrived with it.
            if row.job.prompt_scores is not None:
                row.job.prompt_scores.settle()
        ended = [row for row in record.started if log.has_ended(step, row.slot)]
        if record.batch is not None:
            rows = record.batch.rows
            ended += [rows[i] for i in log.any_ended(step, record.batch.slots)]
        for row in ended:
            # A row that has ended goes on in the steps launched meanwhile.
            if not row.is_done:
                self._end_row(row, step, log)
        if self._watched:
            self._watch(step)

    def _end_row(self, row: Row, step: int, log: TokenLog) -> None:
        job = row.job
        if log.has_failed(step, row.slot):
            self._learn(row, step - 1)
            count = len(job.request.output_ids)
            self.complete(job, "error", f"the logits of token {count} are NaN")
            return
        self._learn(row, step)
        try:
            stopped = job.request.output_ids[-1] in job.params.eos_ids or _stops(job)
        except Exception as error:
            self.fail(job, error)
            return
        self.complete(job, "stop" if stopped else "length")

    def _watch(self, step: int) -> None:
        """Let stop checks and callbacks see the tokens up to a step."""
        for job in list(self._watched.values()):
            row = job.row
            if row is None or row.is_done or row.next_watched > min(step, row.last_step):
                continue
            self._learn(row, step)
            try:
                # Where an interrupt breaks the check off, it is made again.
                if _stops(job):
                    self.complete(job, "stop")
                    continue
                row.next_watched = step + 1
                if job.on_output is not None and job.streams:
                    output = job.output(since=job.num_called)
                    job.num_called = len(job.request.output_ids)
                    job.on_output(output)
            except Exception as error:
                self.fail(job, error)

    def _learn(self, row: Row, step: int) -> None:
        """Give a row's request its tokens up to a step."""
        last = min(step, row.last_step)
        if row.is_done or last < row.next_step:
            return
        assert self._log is not None
        job = row.job
        with uninterrupted:
            row.output_ids += self._log.tokens(row.slot, row.next_step, last)
            if job.logprobs is not None:
                job.logprobs += self._log.logprobs(row.slot, row.next_step, last)
            if job.tops is not None:
                for words in self._log.tops(row.slot, row.next_step, last, job.tops.count):
                    job.tops.extend(words)
            row.next_step = last + 1


def job_of(request: Request) -> Job:
    """Return the job that a request belongs to."""
    assert isinstance(request.payload, Job)
    return request.payload


def _stops(job: Job) -> bool:
    check, request = job.params.stop_check, job.request
    return check is not None and check(request.prompt_ids or (), request.output_ids)


__all__ = ["Ledger", "job_of"]
