"""What all doors share: slot state, block allocator, KV pool, graphs and the runner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from torch_paged.cache.blocks import BlockAllocator
from torch_paged.cache.layout import make_layout
from torch_paged.cache.pool import KVPool, is_lack_of_memory
from torch_paged.cache.prefix import PrefixCache
from torch_paged.config import Config
from torch_paged.decoder.inputs import Binding
from torch_paged.decoder.state import DEFAULT_EOS_IDS, SlotState
from torch_paged.engine.host_blocks import HostBlocks
from torch_paged.engine.leases import Leases
from torch_paged.engine.pool_limit import max_pool_bytes
from torch_paged.engine.protocols import StepModel
from torch_paged.engine.runner import CapturedRunner, EagerRunner, Runner
from torch_paged.engine.sampling_state import SamplingState
from torch_paged.engine.slot_pool import SlotPool
from torch_paged.engine.turns import Turns
from torch_paged.errors import OutOfBlocks, TorchPagedError
from torch_paged.graphs.buckets import default_buckets
from torch_paged.graphs.capture import GraphCache
from torch_paged.graphs.pool import GraphPool
from torch_paged.ops.paged_attention.config import SHORT_TOKENS

logger = logging.getLogger("torch_paged")

# Weights that move this many runs in a row are not worth capturing for.
_MAX_MOVES = 3
# Above what all buckets of decode and prefill need together for one way to choose tokens: dropping
# one waits for the device.
_MAX_GRAPHS = 256
_UNBOUND = (-1, -1)
# A pool that must copy to grow does so in few, large steps.
_GROWTH_FACTOR = 1.5
_MIN_GROWTH_BYTES = 64 << 20


@dataclass(slots=True)
class Counters:
    """Running totals for `stats()`."""

    tokens: int = 0
    steps: int = 0
    launches: int = 0  # of an engine, steps without decoding rows among them
    seconds: float = 0.0
    preemptions: int = 0
    swaps: int = 0  # of these, copied to the host


Resource = TypeVar("Resource")


def _taken(resource: Resource | None) -> Resource:
    if resource is None:
        raise TorchPagedError(
            "the model's KV cache is gone in the middle of a call: release(), restore() or "
            "accelerate() was called from a streamer, processor, criterion or callback; call it "
            "after generate() has returned"
        )
    return resource


class EngineCore:
    """Owns the device state of one model; not thread-safe, callers hold the model's lock.

    Args:
        step: the model's step.
        config: validated configuration.
        max_model_len: tokens that a block table row has room for at first, unless all are short.
        turns: lock and stream order of the model.

    Attributes:
        leases: blocks that nobody computes with; they come back when room is needed.
    """

    def __init__(
        self, step: StepModel, config: Config, max_model_len: int, turns: Turns | None = None
    ) -> None:
        self.leases = Leases(turns or Turns())
        self.step = step
        self.config = config
        self.counters = Counters()
        self.made_for = (step.device, step.dtype)
        self.max_model_len = max_model_len
        self.layout = make_layout(step.layer_shapes, step.layer_windows, max_model_len)
        named = config.kv_cache_dtype
        self._kv_dtype = step.dtype if named == "auto" else getattr(torch, named)
        self._state: SlotState | None = None
        self._pool: KVPool | None = None
        self._bound = _UNBOUND
        self._graphs: GraphCache[Tensor | None] | None = None
        self._runner: Runner | None = None
        self._allocator: BlockAllocator | None = None
        self._prefixes: PrefixCache | None = None
        self._sampling: SamplingState | None = None
        self._host_blocks: HostBlocks | None = None
        self._slots = SlotPool(0)
        self._moves_in_a_row = 0
        # Called before anything else happens: by now nobody listens to what they clean up.
        self.orphans: list[Callable[[], object]] = []

    @property
    def state(self) -> SlotState:
        return _taken(self._state)

    @property
    def pool(self) -> KVPool:
        return _taken(self._pool)

    @property
    def allocator(self) -> BlockAllocator:
        return _taken(self._allocator)

    @property
    def slots(self) -> SlotPool:
        """The slots of the state; whoever runs rows takes them here."""
        return self._slots

    @property
    def prefixes(self) -> PrefixCache:
        """The index of cached prefixes over the allocator."""
        if self._prefixes is None:
            self._prefixes = PrefixCache(self.allocator)
        return self._prefixes

    @property
    def has_prefixes(self) -> bool:
        """Whether a block could be found by its prefix."""
        return self._prefixes is not None and len(self._prefixes) > 0

    @property
    def host_blocks(self) -> HostBlocks:
        """Host memory for blocks; none is taken before somebody takes a block."""
        if self._host_blocks is None:
            self._host_blocks = HostBlocks(self.pool)
        return self._host_blocks

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory held for blocks."""
        return 0 if self._host_blocks is None else self._host_blocks.nbytes

    @property
    def sampling(self) -> SamplingState:
        """Sampling parameters by slot."""
        if self._sampling is None:
            self._sampling = SamplingState(
                self.state.max_num_seqs, self.step.vocab_size, self.device
            )
        return self._sampling

    @property
    def is_prepared(self) -> bool:
        """Whether state and pool exist: not before the first call, nor after `release`."""
        return self._state is not None

    @property
    def graphs(self) -> GraphCache[Tensor | None] | None:
        """The graphs held now, None before the first capture or without CUDA graphs."""
        return self._graphs

    @property
    def num_blocks(self) -> int:
        return 0 if self._pool is None else self._pool.num_blocks

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold, without those that only a lease keeps."""
        return 0 if self._allocator is None else self._allocator.num_live - self.num_leased

    @property
    def num_leased(self) -> int:
        """Blocks that only a lease keeps."""
        return 0 if self._allocator is None else self.leases.num_leased(self._allocator)

    @property
    def progress(self) -> tuple[int, int]:
        """What changes whenever somebody launches a step."""
        return self.counters.launches, self.counters.steps

    @property
    def device(self) -> torch.device:
        return self.step.device

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        """Batch sizes for which a step is captured, none above the slots of the state."""
        most = self.state.max_num_seqs  # less than in the config where rows are large
        sizes = tuple(n for n in self.config.batch_buckets or () if n <= most)
        return sizes or default_buckets(most)

    def prepare(self, num_seqs: int, max_tokens: int, num_eos_ids: int) -> None:
        """Make state and pool large enough for a batch, and notice moved weights.

        Args:
            num_seqs: rows that run at the same time, besides those that hold slots now.
            max_tokens: longest sequence of the batch, prompt included.
            num_eos_ids: most end tokens of any row.
        """
        while self.orphans:
            self.orphans[0]()  # again, if an interrupt breaks it off
            del self.orphans[0]
        self.leases.collect()
        if self._pool is None:
            shapes = self.step.layer_shapes
            self._allocator = BlockAllocator(0)
            self._pool = KVPool(
                [shapes[layer] for layer in self.layout.representatives],
                self.config.block_size,
                self._kv_dtype,
                self.device,
                max_bytes=max_pool_bytes(self.config, self.device),
            )
        self._prepare_state(num_seqs, max_tokens, num_eos_ids)
        moved = self.step.refresh()
        self._moves_in_a_row = self._moves_in_a_row + 1 if moved else 0
        if moved:
            self._drop_graphs()
        if self._moves_in_a_row == _MAX_MOVES:
            logger.warning(
                "the model's parameters moved %d calls in a row; decoding without CUDA graphs "
                "until they stay in place",
                _MAX_MOVES,
            )

    def layer_cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return where a layer keeps keys and values; others may have blocks there too."""
        _, tensor = self.layout.places[layer]
        return self.pool.keys[tensor], self.pool.values[tensor]

    def make_room(self, num_blocks: int) -> bool:
        """Free so many more blocks: grow the pool, or past its limit revoke leases.

        False when neither gives enough.
        """
        wanted = self.allocator.num_free + num_blocks
        self.leases.collect()
        missing = wanted - self.allocator.num_free
        if missing <= 0 or self._grow_pool(missing):
            return True
        leased = self.num_leased
        if missing > leased:
            if not leased or not self._grow_pool(missing - leased):
                return False
            missing = wanted - self.allocator.num_free
        return self.leases.free_up(missing, self.allocator)

    def _grow_pool(self, num_blocks: int) -> bool:
        """Grow the pool by at least `num_blocks`; False when its limit does not allow that."""
        pool = self.pool
        least = pool.num_blocks + num_blocks
        floor = -(-_MIN_GROWTH_BYTES // pool.block_bytes)
        wanted = max(least, min(pool.num_blocks + floor, int(pool.num_blocks * _GROWTH_FACTOR)))
        for target in (wanted, least):
            try:
                pool.grow(target)
            except OutOfBlocks as error:  # our limit, or the device's
                logger.debug("cannot grow the KV pool to %d blocks: %s", target, error)
                continue
            self.allocator.grow(pool.num_blocks)
            return True
        return False

    def runner(self) -> Runner:
        """Return the runner for the next launch, rebound if the pool has moved."""
        pool = self.pool
        if self._bound[0] != pool.generation:
            self._drop_graphs()
        if self._bound != (pool.generation, pool.num_blocks):
            self._bind()
        captured = (
            self.device.type == "cuda"
            and self.config.cuda_graphs
            and self._moves_in_a_row < _MAX_MOVES
        )
        if captured and not isinstance(self._runner, CapturedRunner):
            if self._graphs is None:
                self._graphs = GraphCache(GraphPool(self.device), _MAX_GRAPHS)
            self._runner = CapturedRunner(self.step, self.state, self._graphs, self.batch_buckets)
        elif not captured and type(self._runner) is not EagerRunner:
            self._runner = EagerRunner(self.step, self.state)
        assert self._runner is not None
        return self._runner

    def make_room_beyond(self, num_blocks: int) -> bool:
        """Like `make_room`, but past `gpu_memory_utilization` while the device has room.

        For `generate()`, which has nobody to preempt and would answer without us. An explicit
        `kv_cache_memory` still holds.
        """
        if self.make_room(num_blocks):
            return True
        if self.config.kv_cache_memory is not None:
            return False
        self.pool.max_bytes = None
        return self.make_room(num_blocks)

    def eager_runner(self) -> Runner:
        """Return a runner that captures nothing, for the current binding."""
        self.runner()
        return EagerRunner(self.step, self.state)

    def release(self) -> None:
        """Give back the KV pool, host memory for its blocks, the graphs and the slot state.

        Raises:
            OutOfMemory: there is no memory to copy out leased blocks; nothing was given back.
        """
        self.leases.revoke_all()
        self._drop_graphs()
        self._graphs = None
        if self._pool is not None:
            self._pool.release()
        self._pool = self._allocator = self._state = None
        self._prefixes = self._sampling = None
        if self._host_blocks is not None:
            self._host_blocks.release()
        self._host_blocks = None
        self._slots = SlotPool(0)
        self._runner = None
        self._bound = _UNBOUND
        self._moves_in_a_row = 0
        self.step.unbind()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def ensure_columns(self, num_tokens: int) -> None:
        """Make the block table wide enough for rows of `num_tokens`; widening recaptures."""
        columns = -(-num_tokens // self.config.block_size)
        if columns > self.state.max_blocks:
            self.state.widen_block_tables(2 * columns)
            self._drop_graphs()
            self._bound = _UNBOUND

    def _prepare_state(self, num_seqs: int, max_tokens: int, num_eos_ids: int) -> None:
        # Attention is tuned by the width of the table, so it has one of two.
        if max_tokens > SHORT_TOKENS or self.max_model_len < SHORT_TOKENS:
            max_tokens = max(max_tokens, self.max_model_len)
        else:
            max_tokens = SHORT_TOKENS
        max_blocks = -(-max_tokens // self.config.block_size)
        num_held = self._slots.num_slots - self._slots.num_free
        num_seqs = num_held + num_seqs
        if not self.step.keeps_state:  # a state can be as large as thousands of tokens
            num_seqs = max(num_seqs, self.config.max_num_seqs)
        num_eos_ids = max(num_eos_ids, DEFAULT_EOS_IDS)
        old = self._state
        if old is not None:
            if (
                old.max_num_seqs >= num_seqs
                and self._slots.num_slots >= num_seqs  # unless an interrupt came before that
                and old.max_blocks >= max_blocks
                and old.num_eos_ids >= num_eos_ids
            ):
                return
            num_seqs = max(num_seqs, old.max_num_seqs)
            max_blocks = max(max_blocks, old.max_blocks)
            num_eos_ids = max(num_eos_ids, old.num_eos_ids)
        kv_heads = max(shape.num_kv_heads for shape in self.step.layer_shapes)
        try:
            state = SlotState(
                num_seqs,
                max_blocks,
                kv_heads,
                self.device,
                num_eos_ids=num_eos_ids,
                num_tables=self.layout.num_tables,
            )
        except (RuntimeError, MemoryError) as error:
            if not is_lack_of_memory(error):
                raise
            raise OutOfBlocks(
                f"no memory for the state of {num_seqs} sequences of up to "
                f"{max_blocks * self.config.block_size} tokens: {error}; lower max_num_seqs or "
                "max_model_len"
            ) from error
        if old is not None and num_held:
            state.take_rows(old)
        if self._sampling is not None:
            self._sampling = self._sampling.grown(num_seqs)
        self._bound = _UNBOUND
        self._state = state
        self._slots.grow(num_seqs)

    def _bind(self) -> None:
        # A pool that grew in place has new tensor objects over the same addresses: graphs stay.
        pool, places = self.pool, self.layout.places
        self.step.bind(
            Binding(
                self.state,
                tuple(pool.keys[tensor] for _, tensor in places),
                tuple(pool.values[tensor] for _, tensor in places),
                tuple(table for table, _ in places),
            )
        )
        self._bound = (pool.generation, pool.num_blocks)

    def _drop_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()
        self._runner = None
