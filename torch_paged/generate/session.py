"""What one accelerated model carries: its spec, step, engine core, lock and history."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import Counter
from typing import Any, Literal

import torch
from torch import nn

from torch_paged.config import Config
from torch_paged.decoder.plan_text import fold_layers
from torch_paged.decoder.step import DecoderStep
from torch_paged.engine.core import EngineCore
from torch_paged.generate.logprobs import TokenLogprobs
from torch_paged.generate.registry import turns_of
from torch_paged.generate.samplers import SamplerShelf
from torch_paged.generate.selftest import selftest_reason
from torch_paged.log import warn_once
from torch_paged.ops.triton_compat import HAS_TRITON
from torch_paged.patches.attention_seams import foreign_attention_reason
from torch_paged.patches.families import (
    dropout_reason,
    hook_reason,
    is_multimodal,
    modules_beside,
    read_spec,
)
from torch_paged.patches.patched_step import PatchedStep
from torch_paged.patches.refusal import SpecRefusal
from torch_paged.patches.seams import global_forward_hooks
from torch_paged.report import CallReport, Report, SlotRow, Stats

Tier = Literal["fused", "patched", "eager"]

_OLDEST_CAPABILITY = (7, 5)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Columns of the block table at the start; longer rows widen it.
_MAX_TABLE_TOKENS = 131072
# Settings by which tier, pool or graphs were made. The others are read where they apply.
_MADE_BY = (
    "block_size",
    "kv_cache_memory",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "batch_buckets",
    "cuda_graphs",
)


class Session:
    """State of one accelerated model, kept in a weak registry beside it.

    Holds submodules of the model (through the spec) but never the model itself.
    """

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.config = config
        self.turns = turns_of(model)
        self.fallbacks: Counter[str] = Counter()
        self.last_call: CallReport | None = None
        self.core: EngineCore | None = None
        self.step: DecoderStep | PatchedStep | None = None
        self.reasons: list[str] = []
        self.dropout = ""
        # Whether our steps go on behind prompts with images, which the model computes itself.
        self.reads_images = False
        self.samplers = SamplerShelf()
        # Where calls leave their log-probabilities, if anyone wants them.
        self.logprobs: TokenLogprobs | None = None
        self._model = weakref.ref(model)
        self._verified: set[tuple[torch.device, torch.dtype]] = set()
        self._placement = ""
        self._undecided = False
        self._configs: tuple[Any, Any] = (None, None)
        self.read()

    @property
    def lock(self) -> threading.RLock:
        """Held by whoever uses the model, its core or its pool."""
        return self.turns.lock

    @property
    def model(self) -> Any:
        model = self._model()
        assert model is not None
        return model

    def read(self) -> None:
        """Choose the tier anew; `reasons` says why it is not the fused one."""
        self.release()
        self.core = self.step = None
        self.reasons = []
        self._verified.clear()
        self._undecided = False
        self.reads_images = False
        self._placement = self._outer_reason()
        if self._placement:
            self.reasons = [self._placement]
            return
        self.dropout = dropout_reason(self.model)
        try:
            beside = modules_beside(self.model)
            self._use(DecoderStep(self.model, read_spec(self.model), beside=beside))
            self.reads_images = is_multimodal(self.model)
        except SpecRefusal as refusal:
            self.reasons = [str(refusal)]
            self._undecided = True

    def reconfigure(self, config: Config) -> bool:
        """Take over a configuration under which pool and graphs can stay; say whether they can."""
        if any(getattr(config, name) != getattr(self.config, name) for name in _MADE_BY):
            return False
        with self.lock:
            self.config = config
            if self.core is not None:
                self.core.config = config
        return True

    def decide_tier(self) -> Tier:
        """Return the tier; probing the model for the patched one takes a short forward."""
        if self._undecided:
            self._undecided = False
            try:
                self._use(PatchedStep(self.model))
            except SpecRefusal as refusal:
                self.reasons.append(str(refusal))
        if self.core is None:
            return "eager"
        return "fused" if isinstance(self.step, DecoderStep) else "patched"

    def _use(self, step: DecoderStep | PatchedStep) -> None:
        self.step = step
        text = self._text_config()
        limit = step.max_positions or getattr(text, "max_position_embeddings", None)
        limit = limit or _MAX_TABLE_TOKENS
        length = min(int(limit), _MAX_TABLE_TOKENS)
        self.core = EngineCore(step, self.config, length, self.turns)
        # A session ends with its model.
        weakref.finalize(self, self.core.leases.end_of_model).atexit = False

    def _text_config(self) -> Any:
        """Return the text part of the model's config; transformers takes 10 us to find it."""
        config, text = self._configs
        if config is not self.model.config:
            config = self.model.config
            text = config.get_text_config()
            self._configs = (config, text)
        return text

    def _outer_reason(self) -> str:
        """Say what rules out both of our tiers, or return ""."""
        reason = placement_reason(self.model) or hook_reason(self.model)
        reason = reason or foreign_attention_reason(self._text_config())
        named = self.config.kv_cache_dtype
        dtype = str(self.model.get_input_embeddings().weight.dtype).removeprefix("torch.")
        if not reason and named not in ("auto", dtype):
            reason = f"kv_cache_dtype={named!r} for a model in {dtype} is not supported; "
            reason += "leave it at 'auto'"
        return reason

    def reread_if_changed(self) -> None:
        """Read the model again if modules, hooks, attention or devices changed since."""
        if self.step is None or self.core is None:
            changed = self._placement != self._outer_reason()
        else:
            changed = self.step.watch.structure_changed() or any(global_forward_hooks())
            changed |= bool(foreign_attention_reason(self._text_config()))
            changed |= (self.step.device, self.step.dtype) != self.core.made_for
        if changed:
            self.read()

    def self_test_reason(self) -> str:
        """Compare our logits with the model's own, once per device and dtype.

        A fused step that fails gives way to the patched one, and that to the model's own loop.
        """
        while self.config.verify and self.step is not None and self.core is not None:
            key = (self.step.device, self.step.dtype)
            if key in self._verified:
                break
            counters = dataclasses.replace(self.core.counters)
            reason = selftest_reason(self.model, self.core)
            self.core.counters = counters
            if not reason:
                self._verified.add(key)
                break
            self.core.release()
            self._undecided = isinstance(self.step, DecoderStep)
            self.core = self.step = None
            self.reads_images = False
            self.reasons.append(reason)
            self.decide_tier()
        return "" if self.core is not None else "; ".join(self.reasons)

    def enter_stream(self) -> None:
        """Order this call behind the last one when the caller's stream has changed."""
        if self.step is not None:
            self.turns.enter_stream(self.step.device)

    def miss_logprobs(self, why: str) -> None:
        """Note that a call leaves no log-probabilities."""
        if self.logprobs is not None:
            self.logprobs.miss(why)

    def record_fallback(self, reasons: list[str]) -> None:
        """Note a call that Hugging Face's own code serves, and log each reason once."""
        self.last_call = CallReport("eager", None, tuple(reasons))
        self.miss_logprobs("the call ran Hugging Face's own code: " + "; ".join(reasons))
        for reason in reasons:
            self.fallbacks[reason] += 1
            warn_once(f"generate() runs Hugging Face's own code: {reason}")

    def report(self) -> Report:
        """Describe tier, slots, plan and the last call."""
        tier, plan = self.decide_tier(), ""
        rows: tuple[SlotRow, ...] = ()
        if isinstance(self.step, DecoderStep):
            rows = tuple(SlotRow(row.name, row.kind, row.why) for row in self.step.slot_rows())
            plan = fold_layers(self.step.plan("decode", 1))
        return Report(tier, rows, tuple(self.reasons), plan, self.last_call)

    def stats(self) -> Stats:
        """Return the counters."""
        core = self.core
        if core is None:
            return Stats(fallbacks=dict(self.fallbacks))
        graphs, counters = core.graphs, core.counters
        per_step = 1e3 * counters.seconds / counters.steps if counters.steps else None
        return Stats(
            tokens=counters.tokens,
            steps=counters.steps,
            ms_per_step=per_step,
            kv_blocks_total=core.num_blocks,
            kv_blocks_used=core.num_used,
            kv_blocks_leased=core.num_leased,
            kv_bytes=0 if core.num_blocks == 0 else core.pool.nbytes,
            preemptions=counters.preemptions,
            swaps=counters.swaps,
            host_bytes=core.host_bytes,
            graphs=0 if graphs is None else graphs.num_graphs,
            graph_bytes=0 if graphs is None else graphs.nbytes,
            capture_seconds=0.0 if graphs is None else graphs.capture_seconds,
            fallbacks=dict(self.fallbacks),
            recaptures=0 if graphs is None else graphs.recaptures,
            not_captured={} if graphs is None else dict(graphs.refusals),
        )

    def revoke_leases(self) -> None:
        """Copy out what returned caches hold."""
        if self.core is not None:
            with self.lock:
                self.core.leases.revoke_all()

    def release(self) -> None:
        """Give pool, graphs and slot state back; the next call takes them again.

        Raises:
            OutOfMemory: no memory to copy out what returned caches hold; nothing was given back.
        """
        self.samplers.clear()
        if self.core is not None:
            with self.lock:
                self.core.release()


def placement_reason(model: Any) -> str:
    """Say why the placement of the model rules out our step, or return ""."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    devices = {p.device for p in model.parameters()}
    if not devices:
        return "it has no parameters"
    if any(device.type == "meta" for device in devices):
        return "parameters are on the meta device (offloaded, or not loaded yet)"
    if len(devices) > 1:
        return "it is spread over " + ", ".join(sorted(map(str, devices)))
    (device,) = devices
    dtype = model.get_input_embeddings().weight.dtype
    if dtype not in _DTYPES:
        return f"its embeddings are {str(dtype).removeprefix('torch.')}"
    if device.type == "cpu":
        return ""
    if device.type != "cuda" or torch.version.hip:
        return f"devices of type {device.type} are not supported"
    if not HAS_TRITON:
        return "triton is not installed; install triton>=3.6"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_CAPABILITY:
        return f"the GPU is sm_{capability[0]}{capability[1]}, older than sm_75"
    return ""
