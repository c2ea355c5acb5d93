"""The models of a report: built once, and never timed before their results were checked."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import torch_paged
from benchmarks import decode, serving, shapes, startup
from benchmarks.parity import Oracle, Warp, WrongResult
from benchmarks.ragged import Settings as RaggedSettings
from benchmarks.record import Record, Row, measured
from benchmarks.runs import fresh_ids
from benchmarks.timing import Timing

OURS = "torch_paged"
_PROMPT = 32  # of the checks
# Seconds until a model is built, accelerated and has its first tokens, kernels compiled.
_READY_S = {"0.6b": 20.0, "1b": 20.0, "8b": 30.0, shapes.TINY: 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured.

    Attributes:
        prefill: three lengths of a prompt.
        new: decode steps that are differenced, behind a prompt of `prompt` tokens.
        cold_bytes: what the launches of an op together read at least, past any cache.
        check_positions: positions of a batch that are checked, over all rows; 8 a row at least.
        hf_new: decode steps of the baselines that are slow.
        batch_work: requests of `generate_batch`, and new tokens of each.
        expected_s: roughly what a measurement takes, 1 at the true shapes on an H200.
    """

    prompt: int = 128
    new: int = 128
    repeats: int = 3
    check_positions: int = 512
    prefill: Sequence[int] = (512, 2048, 8192)
    long_model: str = "1b"
    long_context: int = 32768
    long_steps: int = 64
    last_positions: int = 24
    max_bucket: int = 256
    prefill_op: int = 2048
    cold_bytes: int = 400 << 20
    ragged: RaggedSettings = field(default_factory=lambda: RaggedSettings(busy=True))
    hf_new: int = 16
    hf_repeats: int = 2
    static_new: int = 64
    batch_work: tuple[int, int] = (32, 32)
    expected_s: float = 1.0


TRUE = Scale()
QUICK = Scale(
    new=64,
    repeats=2,
    check_positions=128,
    ragged=RaggedSettings(requests=256, streams=(32,), repeats=1, response=False),
    hf_new=8,
    hf_repeats=1,
    static_new=32,
    expected_s=0.6,
)
SMALL = Scale(
    prompt=8,
    new=6,
    repeats=2,
    check_positions=16,
    prefill=(16, 40, 72),
    long_model=shapes.TINY,
    long_context=200,
    long_steps=4,
    last_positions=8,
    max_bucket=8,
    prefill_op=64,
    cold_bytes=0,
    ragged=RaggedSettings(requests=8, streams=(2,), max_num_seqs=4, repeats=1, scale=0.02),
    hf_new=3,
    hf_repeats=1,
    static_new=3,
    batch_work=(2, 3),
    expected_s=0.02,
)


class Bench:
    """What the sections of a report share.

    Attributes:
        read_tbps, peak_tflops: the ceilings of this run.
    """

    def __init__(
        self,
        record: Record,
        scale: Scale,
        device: torch.device,
        dtype: torch.dtype,
        models: Sequence[str],
        batches: Sequence[int],
        *,
        read_tbps: float,
        peak_tflops: float,
    ) -> None:
        self.record = record
        self.scale = scale
        self.device = device
        self.dtype = dtype
        self.models = tuple(models)
        self.batches = tuple(batches)
        self.read_tbps = read_tbps
        self.peak_tflops = peak_tflops
        self._built: dict[str, Any] = {}
        self._checked: set[tuple[str, str, int]] = set()

    @property
    def is_exact(self) -> bool:
        """Whether rounding is so small that tokens can be compared one by one."""
        return self.dtype == torch.float32

    def ready_s(self, name: str) -> float:
        """Return roughly the seconds until `accelerated` returns."""
        return 0.0 if name in self._built else _READY_S[name]

    def accelerated(self, name: str) -> Any:
        """Return a model that decodes on our step; the first time takes its start-up time."""
        model = self._model(name)
        if not torch_paged.is_accelerated(model):
            seconds = startup.first_token_s(model, self.scale.prompt)
            key = f"startup/{name}/first"
            if not self.record.has(key):
                case = "to first token, kernels compiled on the way"
                self.record.add([self.row(key, case, "s", seconds)])
        return model

    def plain(self, name: str) -> Any:
        """Return a model as Hugging Face left it."""
        model = self._model(name)
        torch_paged.restore(model)
        return model

    def tidy(self) -> None:
        """Give back what torch keeps cached on a GPU, e.g. between two systems."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def drop_models(self) -> None:
        """Give the memory of all models back."""
        for model in self._built.values():
            torch_paged.restore(model)
        self._built.clear()
        self.tidy()

    def checked(self, name: str, kind: str, sizes: Iterable[int]) -> Any:
        """Return the accelerated model, its results right for this kind of call at these sizes.

        Args:
            kind: "decode", "sampling" or "engine" at batch sizes, "prefill" at prompt lengths.

        Raises:
            WrongResult: one is not.
        """
        model = self.accelerated(name)
        missing = [size for size in sizes if (name, kind, size) not in self._checked]
        if not missing:
            return model
        with Oracle(model) as oracle:
            for size in missing:
                _CHECKS[kind](self, oracle, model, size, f"{name} {kind} {size}")
                self._checked.add((name, kind, size))
        return model

    def rate(self, num_bytes: float, ms: float) -> dict[str, Any]:
        """Return the fields of a row for reading that many bytes."""
        rate = num_bytes / ms / 1e6
        return _achieved(rate, "GB/s", self.read_tbps * 1e3)

    def arithmetic(self, flops: float, ms: float) -> dict[str, Any]:
        """Return the fields of a row for that many operations."""
        return _achieved(flops / ms / 1e9, "TFLOP/s", self.peak_tflops)

    def row(
        self,
        key: str,
        case: str,
        unit: str,
        values: Timing | Mapping[str, float] | float,
        *,
        system: str = OURS,
        extra: Mapping[str, float | str | None] | None = None,
        achieved: Mapping[str, Any] | None = None,
    ) -> Row:
        """Return a row of the measurement `key`, which begins with its section and its model.

        Args:
            values: with repetitions, or differenced, or a single figure.
            achieved: from `rate` or `arithmetic`.
        """
        section, name = key.split("/")[:2]
        if isinstance(values, (int, float)):
            values = Timing(values, values, values, 1)
        return Row(
            key=key,
            section=section,
            model=name,
            system=system,
            case=case,
            unit=unit,
            extra=extra or {},
            **measured(values),
            **(achieved or {}),
        )

    def step_row(
        self,
        key: str,
        case: str,
        model: Any,
        batch: int,
        times: Mapping[str, float],
        *,
        system: str = OURS,
        extra: Mapping[str, float | str | None] | None = None,
    ) -> Row:
        """Return the row of differenced decode steps: their time, and their bytes over it."""
        nbytes = decode.step_bytes(model, batch, self.scale.prompt, int(times["steps"]))
        named = ("end_to_end_ms", "first_token_ms", "first_token_spread_ms")
        figures: dict[str, float | str | None] = {k: times[k] for k in named}
        figures["floor_ms"] = self.floor_ms(nbytes)
        figures |= extra or {}
        rate = self.rate(nbytes, times["ms"])
        return self.row(key, case, "ms/token", times, system=system, extra=figures, achieved=rate)

    def floor_ms(self, num_bytes: float) -> float:
        """Return the milliseconds in which this device reads that much."""
        return num_bytes / self.read_tbps / 1e9

    def _model(self, name: str) -> Any:
        if name not in self._built:
            self._make_room(name)
            self._built[name] = shapes.build(name, device=self.device, dtype=self.dtype)
        return self._built[name]

    def _make_room(self, name: str) -> None:
        """Keep all models where they fit, with a float32 copy and a KV cache beside them."""
        if self.device.type != "cuda" or not self._built:
            return
        meta = shapes.build(name, device="meta", dtype=self.dtype)
        weights = sum(p.nbytes for p in meta.parameters())
        if torch.cuda.mem_get_info(self.device)[0] < 5 * weights:
            self.drop_models()


def _achieved(rate: float, unit: str, ceiling: float) -> dict[str, Any]:
    return {"achieved": rate, "achieved_unit": unit, "of_ceiling": rate / ceiling}


def _check_decode(bench: Bench, oracle: Oracle, model: Any, batch: int, what: str) -> None:
    prompt = fresh_ids(model, batch, _PROMPT)
    new = max(8, bench.scale.check_positions // batch)
    ids = decode.generate(model, prompt, new, **decode.GREEDY)
    oracle.check_greedy(ids, _PROMPT, what)
    oracle.check_logits(ids, _PROMPT, what)


def _check_sampling(bench: Bench, oracle: Oracle, model: Any, batch: int, what: str) -> None:
    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return decode.generate(model, prompt, 8, **decode.SAMPLE)

    prompt = fresh_ids(model, batch, _PROMPT)
    _check_draws([draw(1), draw(1), draw(2)], what, bench.is_exact)
    oracle.check_sampled(draw(3), _PROMPT, Warp(), what)


def _check_engine(bench: Bench, oracle: Oracle, model: Any, batch: int, what: str) -> None:
    prompt = fresh_ids(model, batch, _PROMPT)
    with torch_paged.Engine(model) as engine:

        def draw(seed: int) -> torch.Tensor:
            return serving.generate(engine, prompt, 8, seed=seed, **decode.SAMPLE)

        ids = serving.generate(engine, prompt, 8, **decode.GREEDY)
        oracle.check_greedy(ids, _PROMPT, what)
        _check_draws([draw(1000), draw(1000), draw(2000)], what, bench.is_exact)
        oracle.check_sampled(draw(3000), _PROMPT, Warp(), what)


def _check_draws(draws: Sequence[torch.Tensor], what: str, exact: bool) -> None:
    """Check draws by seeds a, a and b.

    In low precision a batch met again may round differently (a captured prefill has padding), so
    a few tokens may part.
    """
    first, again, other = draws
    rows = first.shape[0]
    same = int((first == again)[:, _PROMPT].sum())
    if not torch.equal(first, again) if exact else rows >= 8 and same < 0.75 * rows:
        raise WrongResult(
            f"{what}: the same seed gave other tokens in {rows - same} of {rows} rows"
        )
    if torch.equal(first, other):
        raise WrongResult(f"{what}: another seed gave the same tokens")


def _check_prefill(bench: Bench, oracle: Oracle, model: Any, length: int, what: str) -> None:
    ids = fresh_ids(model, 1, length + bench.scale.last_positions)
    oracle.check_logits(ids, length, what)


_CHECKS = {
    "decode": _check_decode,
    "sampling": _check_sampling,
    "engine": _check_engine,
    "prefill": _check_prefill,
}

__all__ = ["OURS", "QUICK", "SMALL", "TRUE", "Bench", "Scale"]
