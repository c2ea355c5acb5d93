"""A generation request: what was asked for, and where it stands in the scheduler."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Literal

from torch_paged.cache.layout import ONE_KIND
from torch_paged.engine.held_blocks import HeldBlocks, no_blocks

FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestStatus(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"  # never admitted yet
    RUNNING = "running"  # has a slot and blocks, prefills or decodes
    PREEMPTED = "preempted"  # was running, waits to be admitted again
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate.

    Attributes:
        prompt_ids: any sequence of ints; None where only the length of the prompt is known
            (input embeddings), and then `num_prompt_tokens` must be given.
        max_new_tokens: at least 1; the scheduler lowers it to what `max_model_len` leaves.
        priority: smaller goes first; only the "priority" policy reads it.
        deadline: `time.monotonic()` seconds after which the request is cancelled, or None.
        payload: the runner's, e.g. sampling parameters; the scheduler does not look at it.
        cache_salt: only requests of equal salt share cached prefixes.
        max_cached_tokens: most tokens of the prompt that a cached prefix may stand for; None: all.
        output_ids: sampled tokens in order, appended by the engine as it learns of them. May
            trail behind the steps that were scheduled.
        num_computed_tokens: tokens whose KV is in the cache. While the row decodes, this and
            `num_output_tokens` stand still; ask `Scheduler.num_computed_tokens` then.
        num_output_tokens: tokens whose sampling has been scheduled.
        num_yields: times that it gave way to other users of the blocks since its last token,
            before all tokens before the next one were computed.
    """

    request_id: Hashable
    prompt_ids: Sequence[int] | None = field(repr=False)
    max_new_tokens: int
    num_prompt_tokens: int = -1
    priority: int = 0
    deadline: float | None = None
    payload: object = field(default=None, repr=False)
    cache_salt: bytes = b""
    max_cached_tokens: int | None = None
    output_ids: list[int] = field(default_factory=list, repr=False)

    # Set by the scheduler.
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None  # what finish_reason alone does not say
    arrival: int = -1  # how many requests came before; -1 = not added yet
    rank: int = 0  # smaller is served first; ties go by arrival
    slot: int | None = None
    blocks: list[HeldBlocks] = field(default_factory=lambda: no_blocks(ONE_KIND), repr=False)
    block_keys: list[bytes] = field(default_factory=list, repr=False)  # for the prefix cache
    host_block_ids: tuple[int, ...] = ()  # where its KV is while it is swapped out
    num_cached_tokens: int = 0  # part of the last prefill that was found or swapped in
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_yields: int = 0
    decode_since: int = -1  # step of its first decode; -1 = does not decode

    def __post_init__(self) -> None:
        if self.prompt_ids is not None:
            given, self.num_prompt_tokens = self.num_prompt_tokens, len(self.prompt_ids)
            if given not in (-1, self.num_prompt_tokens):
                raise ValueError(
                    f"num_prompt_tokens must be len(prompt_ids) = {self.num_prompt_tokens}, got "
                    f"{given}; leave it out"
                )
        if self.num_prompt_tokens < 1:
            raise ValueError(
                f"a prompt must have at least 1 token, got {max(self.num_prompt_tokens, 0)}; pass "
                "prompt_ids, or num_prompt_tokens where the ids are not known"
            )
        if self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens must be at least 1, got {self.max_new_tokens}; a request that "
                "generates nothing needs no scheduler"
            )

    @property
    def num_tokens(self) -> int:
        """Prompt and output: what must be in the cache before the next token is sampled."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def block_ids(self) -> list[int]:
        """All blocks that it holds."""
        return list(chain.from_iterable(held.ids for held in self.blocks))

    @property
    def num_columns(self) -> int:
        """Columns of the block tables up to which all kinds of layer have had blocks."""
        blocks = self.blocks
        return blocks[0].end if len(blocks) == 1 else min(held.end for held in blocks)

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens that are ever in the cache: the last one is sampled but not fed back."""
        return self.num_prompt_tokens + self.max_new_tokens - 1

    @property
    def head_start(self) -> int:
        """Tokens in the cache of a decoding row, less the number of the next step.

        It stays as it is while the row decodes, and orders rows by their length at any step.
        """
        return self.num_computed_tokens - self.decode_since

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED


__all__ = ["FinishReason", "Request", "RequestStatus"]
