"""A decode step of few float32 rows on the CPU, written for the number and the cost of calls.

After the weights of a layer have been streamed, caches are cold, and a torch call on a vector of
some hundred floats costs 25 us or more, a NumPy call into a static buffer a third of that. So
this form of a plan keeps every value in a static buffer with a torch and a NumPy face, lets torch
do the projections, and NumPy the little that is between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torch_paged.decoder.host_math import (
    ACTIVATIONS,
    Array,
    Call,
    attend,
    layer_scaler,
    rms_scaler,
    rotate,
    update_call,
    view,
)
from torch_paged.decoder.inputs import Binding
from torch_paged.decoder.linears import HeldLinear, held_linear, linear_slot
from torch_paged.decoder.plan import (
    Activate,
    Add,
    Attention,
    Embed,
    Glu,
    Instruction,
    Linear,
    LogitTransform,
    Norm,
    Plan,
    RotaryTable,
)
from torch_paged.decoder.plan_rare import AddPositions
from torch_paged.decoder.rotary import inverse_frequencies, long_frequencies
from torch_paged.decoder.slots import plain_slot
from torch_paged.decoder.spec import AttentionSpec, NormSpec, RotaryChange
from torch_paged.ops.rotary_by_span import rotary_by_span_reference

# Attention walks the rows one by one; past this many the batched ops are quicker.
MAX_HOST_ROWS = 8


@dataclass(frozen=True, slots=True)
class _Buffer:
    """One value of the plan: the same memory as a tensor and as an array [num_rows, width]."""

    tensor: Tensor
    array: Array


@dataclass(slots=True)
class _Row:
    """Where a row stands in a block table: its newest index, and its blocks from `start` on."""

    last: int
    start: int  # the first column that anything can see
    blocks: list[int]
    adjacent: bool  # the blocks lie one after the other


class Unsupported(Exception):  # noqa: N818 - it is an answer, not an error
    """Raised while building, where an instruction has no form here."""


class HostStep:
    """One decode step of `num_rows` rows; raises `Unsupported` where the plan has no such form.

    Args:
        plan: an unfused or add-norm-fused decode plan.
        binding: float32 state and cache on the CPU.
    """

    def __init__(self, plan: Plan, binding: Binding, num_rows: int) -> None:
        self._binding = binding
        self._num_rows = num_rows
        self._values: dict[str, _Buffer] = {}
        self._rows: list[list[_Row]] = []  # by block table
        self._slots: list[int] = []
        self._block_size = binding.keys[0].shape[2]
        if any(t.dtype != torch.float32 for t in (*binding.keys, *binding.values)):
            raise Unsupported("the cache is not float32")
        state = binding.state
        self._last_token = state.last_token.numpy()
        self._positions = state.positions.numpy()
        self._context_lens = state.context_lens.numpy()
        self._block_tables = state.block_tables.numpy()
        # Of all layers of a table, how far back they see: None for all tokens.
        self._windows: list[int | None] = [0] * len(self._block_tables)
        self._calls = [self._build(instruction) for instruction in plan.instructions]
        self._result = self._values[plan.result].tensor

    def __call__(self, slots: list[int]) -> Tensor:
        """Return logits [num_rows, vocab_size], valid until the next call; no slot may be -1."""
        self._slots = slots
        self._rows = [
            [self._row(table, slot, window) for slot in slots]
            for table, window in zip(self._block_tables, self._windows, strict=True)
        ]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for call in self._calls:
                call()
        return self._result

    def _row(self, table: Array, slot: int, window: int | None) -> _Row:
        last = int(self._context_lens[slot])
        start = 0 if window is None else max(0, last - window + 1) // self._block_size
        blocks = table[slot, start : last // self._block_size + 1].tolist()
        adjacent = blocks[-1] - blocks[0] == len(blocks) - 1 and blocks == list(
            range(blocks[0], blocks[-1] + 1)
        )
        return _Row(last, start, blocks, adjacent)

    def _buffer(self, name: str, width: int) -> _Buffer:
        with torch.inference_mode(False):
            tensor = torch.zeros(self._num_rows, width, dtype=torch.float32, device="cpu")
        self._values[name] = _Buffer(tensor, tensor.numpy())
        return self._values[name]

    def _build(self, ins: Instruction) -> Call:
        match ins:
            case Embed():
                return self._embed(ins)
            case AddPositions():
                return self._add_positions(ins)
            case RotaryTable():
                return self._rotary(ins)
            case Norm():
                return self._norm(ins)
            case Linear():
                return self._linear(ins)
            case Attention():
                return self._attention(ins)
            case Add():
                return self._add(ins)
            case Glu() | Activate():
                return self._activation(ins)
            case LogitTransform():
                return self._transform(ins)
        raise Unsupported(f"{type(ins).__name__} has no form here")

    def _embed(self, ins: Embed) -> Call:
        module = ins.ref.module
        if plain_slot(module).kind != "fused" or module.weight.dtype != torch.float32:
            raise Unsupported(f"{ins.ref.name} is called as a module")
        table = module.weight.detach().numpy()
        out = self._buffer(ins.target, table.shape[1]).array
        factors = [np.float32(f) for f in (ins.scale, ins.multiplier) if f != 1.0]

        def call() -> None:
            np.take(table, self._last_token[self._slots], axis=0, out=out, mode="clip")
            for factor in factors:
                np.multiply(out, factor, out=out)

        return call

    def _add_positions(self, ins: AddPositions) -> Call:
        weight = ins.spec.ref.module.weight.detach()
        if weight.dtype != torch.float32:
            raise Unsupported(f"{ins.spec.ref.name} is not float32")
        table, source = weight[ins.spec.offset :].numpy(), self._values[ins.source].array
        out = self._buffer(ins.target, table.shape[1]).array

        def call() -> None:
            np.add(source, table[self._positions[self._slots]], out=out)

        return call

    def _rotary(self, ins: RotaryTable) -> Call:
        inv_freq = inverse_frequencies(ins.spec)
        if ins.spec.change is not None:
            return self._changing_rotary(ins, ins.spec.change, inv_freq)
        scaling = ins.spec.scaling
        half = inv_freq.shape[0]
        cos, sin = (self._buffer(name, half) for name in ins.targets)

        def call() -> None:
            positions = torch.from_numpy(self._positions[self._slots]).float()
            angles = positions[:, None] * inv_freq
            torch.mul(angles.cos(), scaling, out=cos.tensor)
            torch.mul(angles.sin(), scaling, out=sin.tensor)

        return call

    def _changing_rotary(self, ins: RotaryTable, change: RotaryChange, inv_freq: Tensor) -> Call:
        cos, sin = (self._buffer(name, inv_freq.shape[0]) for name in ins.targets)
        long = long_frequencies(ins.spec, inv_freq)
        state, scaling = self._binding.state, ins.spec.scaling

        def call() -> None:
            slots = torch.tensor(self._slots, device="cpu")
            rows = (state.positions, slots, state.rotary_leads, state.rotary_floors)
            formula = (change.limit, change.base, change.factor, scaling)
            tables = rotary_by_span_reference(*rows, inv_freq, long, *formula)
            cos.tensor.copy_(tables[0])
            sin.tensor.copy_(tables[1])

        return call

    def _gain(self, spec: NormSpec) -> Array | None:
        weight = getattr(spec.ref.module, "weight", None)
        plain = plain_slot(spec.ref.module).kind != "opaque"
        if not plain or (weight is not None and weight.dtype != torch.float32):
            raise Unsupported(f"{spec.ref.name} is called as a module")
        return None if weight is None else weight.detach().numpy()

    def _scaler(self, spec: NormSpec) -> Callable[[Array, Array], None]:
        weight = self._gain(spec)
        if spec.kind == "rms":
            return rms_scaler(weight, spec)
        bias = getattr(spec.ref.module, "bias", None)
        return layer_scaler(weight, None if bias is None else bias.detach().numpy(), spec)

    def _norm(self, ins: Norm) -> Call:
        source = self._values[ins.source].array
        residual = None if ins.residual is None else self._values[ins.residual].array
        added = None if ins.added is None else self._values[ins.added].array
        out = self._buffer(ins.target, source.shape[1]).array
        summed = source
        if ins.summed is not None:
            summed = self._buffer(ins.summed, source.shape[1]).array
        scale_rows = self._scaler(ins.spec)

        def call() -> None:
            if residual is not None:
                np.add(residual, source, out=summed)
            scale_rows(summed, out)
            if added is not None:
                np.add(added, out, out=out)

        return call

    def _linear(self, ins: Linear) -> Call:
        neighbours = (ins.norm, ins.activation, ins.residual, ins.joined)
        if any(neighbour is not None for neighbour in neighbours):
            raise Unsupported("the plan is fused for a GPU")
        source = self._values[ins.source].tensor
        calls: list[tuple[Tensor, Tensor | None, Tensor]] = []
        updates: list[Call] = []
        for part, target in zip(ins.parts, ins.targets, strict=True):
            module = part.ref.module
            if linear_slot(module).kind == "opaque" or module.weight.dtype != torch.float32:
                raise Unsupported(f"{part.ref.name} is called as a module")
            held = held_linear(module)
            weight = held.weight
            bias = None if held.base.bias is None else held.base.bias.detach()
            out = self._buffer(target, weight.shape[0]).tensor
            calls.append((weight.T, bias, out))
            updates += self._updates(part.ref.name, held, source, out)

        def call() -> None:
            for weight, bias, out in calls:
                if bias is None:
                    torch.mm(source, weight, out=out)
                else:
                    torch.addmm(bias, source, weight, out=out)
            for update in updates:
                update()

        return call

    def _updates(self, name: str, held: HeldLinear, source: Tensor, out: Tensor) -> list[Call]:
        """Return what adds each adapter to `out`, in their order."""
        calls = []
        for update in held.updates:
            if update.dtype != torch.float32:
                raise Unsupported(f"{name} has an adapter in {update.dtype}")
            down, up = update.down.weight.detach().T, update.up.weight.detach().T
            calls.append(update_call(source, down, up, update.scaling, out))
        return calls

    def _attention(self, ins: Attention) -> Call:
        spec = ins.spec
        special = spec.softcap or spec.sinks is not None or spec.alibi_rounded
        if special or spec.layout in ("per_head", "quarters"):
            raise Unsupported("this attention has no form here")
        query, key, value = self._heads(spec, ins.projections)
        tables = None if ins.tables is None else [self._values[t].array for t in ins.tables]
        out = self._buffer(ins.target, spec.num_heads * spec.v_head_dim).array
        out = out.reshape(self._num_rows, spec.num_heads, spec.v_head_dim)
        slopes = None
        if spec.alibi:
            slopes = np.array(spec.alibi, np.float32).reshape(spec.num_kv_heads, -1, 1)
        norms: list[Callable[[Array, Array], None]] = []
        if spec.q_norm is not None and spec.k_norm is not None and not spec.qk_norm_full:
            norms = [self._scaler(norm) for norm in (spec.q_norm, spec.k_norm)]
        k_cache = self._binding.keys[ins.layer].numpy()
        v_cache = self._binding.values[ins.layer].numpy()
        table = self._binding.tables[ins.layer]
        reach = self._windows[table]
        if spec.window == 0 or reach is None:
            self._windows[table] = None
        else:
            self._windows[table] = max(reach, spec.window)

        def call() -> None:
            for norm, heads in zip(norms, (query, key), strict=False):
                norm(heads, heads)
            if tables is not None:
                rotate(query, tables[0], tables[1], spec.interleaved)
                rotate(key, tables[0], tables[1], spec.interleaved)
            for at, row in enumerate(self._rows[table]):
                keys = self._append(row, k_cache, key[at], spec.window)
                values = self._append(row, v_cache, value[at], spec.window)
                out[at] = attend(query[at], keys, values, spec.scale, slopes)

        return call

    def _heads(self, spec: AttentionSpec, names: tuple[str, ...]) -> tuple[Array, Array, Array]:
        """Return query, key and value [num_rows, heads, dim] as views of the projections."""
        sizes = [
            (spec.num_heads, spec.head_dim),
            (spec.num_kv_heads, spec.head_dim),
            (spec.num_kv_heads, spec.v_head_dim),
        ]
        if len(names) == 3:
            arrays = [self._values[name].array for name in names]
        else:
            bounds = np.cumsum([heads * dim for heads, dim in sizes])[:-1]
            arrays = np.split(self._values[names[0]].array, bounds, axis=1)
        query, key, value = (view(a, size) for a, size in zip(arrays, sizes, strict=True))
        return query, key, value

    def _append(self, row: _Row, cache: Array, token: Array, window: int) -> Array:
        """Write `token` [Hkv, D] behind the row; return what it attends to, [Hkv, L, D]."""
        size = self._block_size
        first = max(0, row.last - window + 1) if window > 0 else 0
        blocks = row.blocks[first // size - row.start :]
        cache[blocks[-1], :, row.last % size] = token
        held = cache[blocks[0] : blocks[-1] + 1] if row.adjacent else cache[blocks]
        tokens = held.transpose(1, 0, 2, 3).reshape(cache.shape[1], -1, cache.shape[3])
        base = first // size * size
        return tokens[:, first - base : row.last + 1 - base]

    def _add(self, ins: Add) -> Call:
        left, right = self._values[ins.left].array, self._values[ins.right].array
        out = self._buffer(ins.target, left.shape[1]).array
        multiplier = np.float32(ins.multiplier)
        scaled = ins.multiplier != 1.0

        def call() -> None:
            np.add(left, right * multiplier if scaled else right, out=out)

        return call

    def _activation(self, ins: Glu | Activate) -> Call:
        sources = [self._values[name].tensor for name in ins.sources]
        act = ACTIVATIONS[ins.activation]
        if isinstance(ins, Glu) and len(sources) == 1:
            sources = list(sources[0].chunk(2, dim=-1))
        out = self._buffer(ins.target, sources[0].shape[1]).tensor

        def call() -> None:
            if len(sources) == 2:
                torch.mul(act(sources[0]), sources[1], out=out)
            else:
                out.copy_(act(sources[0]))

        return call

    def _transform(self, ins: LogitTransform) -> Call:
        source = self._values[ins.source].tensor
        out = self._buffer(ins.target, source.shape[1]).tensor

        def call() -> None:
            torch.mul(source, ins.scale, out=out)
            if ins.softcap:
                out.div_(ins.softcap).tanh_().mul_(ins.softcap)

        return call
