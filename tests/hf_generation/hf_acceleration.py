"""A pytest plugin: keep the generation tests, accelerate every model, write down what happened.

Loaded by name into a pytest of a checkout of transformers, so it imports nothing from `tests`,
which is the checkout's there. Where it only records, models stay as they are.
"""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationMixin, PreTrainedModel, set_seed

import torch_paged

_MIXIN_MODULE, _MIXIN = "tests.generation.test_utils", "GenerationTesterMixin"
_INNER_VALUES = ("output_attentions", "output_hidden_states")
_RANK = {"passed": 0, "skipped": 1, "failed": 2}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torch_paged")
    group.addoption("--accelerate-models", action="store_true", help="accelerate at generate()")
    group.addoption("--generation-record", required=True, help="JSON file to write")
    group.addoption("--generation-seed", type=int, default=0, help="seed of every test")
    group.addoption(
        "--every-test", action="store_true", help="keep all tests, and accelerate at eval() too"
    )
    group.addoption(
        "--lean-calls",
        action="store_true",
        help="pad prompts on the left, ask for neither attentions nor hidden states",
    )


def pytest_configure(config: pytest.Config) -> None:
    recorder = Recorder(config)
    config.pluginmanager.register(recorder, "torch_paged_recorder")
    recorder.patch_generate()
    if config.getoption("accelerate_models") and config.getoption("every_test"):
        accelerate_at_eval()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("every_test"):
        return
    mixin = getattr(sys.modules.get(_MIXIN_MODULE), _MIXIN, None)
    if mixin is None:
        raise pytest.UsageError(f"no test imported {_MIXIN} of {_MIXIN_MODULE}")
    kept, dropped = [], []
    for item in items:
        marked = item.get_closest_marker("generate") is not None
        (kept if marked or hasattr(mixin, item.name) else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def accelerate_at_eval() -> None:
    """Let `eval()` accelerate what can generate, whether the test generates or not."""
    original = PreTrainedModel.eval

    @functools.wraps(original)
    def evaluate(model: Any) -> Any:
        if model.can_generate() and not torch_paged.is_accelerated(model):
            torch_paged.accelerate(model)
        return original(model)

    PreTrainedModel.eval = evaluate


class Recorder:
    """Outcome of every test and path of every `generate()`, written when the session ends."""

    def __init__(self, config: pytest.Config) -> None:
        self._accelerate = config.getoption("accelerate_models")
        self._path = Path(config.getoption("generation_record"))
        self._seed = config.getoption("generation_seed")
        self._lean = config.getoption("lean_calls")
        self._calls: list[dict[str, Any]] = []
        self._depth = 0
        # The reports of earlier calls, kept so that none is counted twice.
        self._reports: list[Any] = []
        self._tests: dict[str, dict[str, Any]] = {}

    def patch_generate(self) -> None:
        """Put ourselves around `GenerationMixin.generate`; its signature stays visible."""
        original = GenerationMixin.generate

        @functools.wraps(original)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            return self._generate(original, model, args, kwargs)

        GenerationMixin.generate = generate

    def _generate(
        self, original: Callable[..., Any], model: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        for each in (model, kwargs.get("assistant_model")):
            if self._accelerate and each is not None and not torch_paged.is_accelerated(each):
                torch_paged.accelerate(each)
        if self._lean:
            kwargs = _lean(kwargs)
        output = None
        self._depth += 1
        try:
            output = original(model, *args, **kwargs)
        finally:
            self._depth -= 1
            # Calls within a call, such as those of an assistant, are its own affair.
            if self._depth == 0:
                self._calls.append({"output": _summary(output, kwargs), **self._path_of(model)})
        return output

    def _path_of(self, model: Any) -> dict[str, Any]:
        if not self._accelerate:
            return {}
        report = torch_paged.explain(model).last_call
        if report is None or any(report is seen for seen in self._reports):
            # It raised before it decoded, or a nested call has counted already.
            return {"path": "none", "loop": None, "reasons": []}
        self._reports.append(report)
        return {"path": report.path, "loop": report.loop, "reasons": list(report.reasons)}

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        set_seed(self._seed)
        # Where the tests draw their prompts from.
        common = sys.modules["tests.test_modeling_common"]
        common.global_rng = random.Random(self._seed)
        self._calls.clear()
        self._reports.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(report.nodeid, {"outcome": "passed", "why": "", "calls": []})
        if _RANK[report.outcome] > _RANK[test["outcome"]]:
            test["outcome"], test["why"] = report.outcome, _why(report)
        if report.when == "call":
            test["calls"] = list(self._calls)

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._tests, indent=1))


def _lean(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments without what only Hugging Face's own code serves."""
    kwargs = {k: v for k, v in kwargs.items() if k not in _INNER_VALUES}
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 2 and not mask[:, -1].all():
        kwargs["attention_mask"] = mask.flip(1)
    return kwargs


def _summary(output: Any, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return shapes, tokens and a few figures of all that a call returned; None if it raised."""
    if isinstance(output, torch.Tensor):
        return {"sequences": output.tolist()}
    if output is None:
        return None
    summary: dict[str, Any] = {"type": type(output).__name__, "keys": sorted(output.keys())}
    if output.get("sequences") is not None:
        summary["sequences"] = output["sequences"].tolist()
    for name in ("scores", "logits", "beam_indices", "sequences_scores"):
        values = output.get(name)
        if values is not None:
            tensors = [values] if isinstance(values, torch.Tensor) else values
            summary[name] = [_figures(tensor) for tensor in tensors]
    mask = kwargs.get("attention_mask")
    # Renamed by 5.24.
    cache = output.get("cache", output.get("past_key_values"))
    for layer in getattr(cache, "layers", ()):
        states = [_visible(states, mask) for states in _layer_states(layer)]
        summary.setdefault("cache", []).append([_figures(tensor) for tensor in states])
    return summary


def _layer_states(layer: Any) -> list[torch.Tensor]:
    """Return keys and values of a layer of a cache, each [rows, heads, columns, dim]."""
    states = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return [x for x in states if isinstance(x, torch.Tensor) and x.dim() == 4]


def _visible(states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Zero the columns that the call's mask hides: what a cache holds there is never read."""
    if mask is None or mask.dim() != 2 or states.shape[2] < mask.shape[1]:
        return states
    mask = mask.repeat_interleave(states.shape[0] // mask.shape[0], dim=0)
    mask = torch.nn.functional.pad(mask, (0, states.shape[2] - mask.shape[1]), value=1)
    return torch.where(mask[:, None, :, None] != 0, states, 0)


def _figures(tensor: torch.Tensor) -> list[Any]:
    """Return shape, number of finite elements, and two sums that most changes show in."""
    flat = tensor.detach().double().reshape(-1)
    finite = torch.isfinite(flat)
    flat = torch.where(finite, flat, 0)
    weights = torch.linspace(0.5, 1.5, flat.numel(), dtype=torch.float64)
    sums = [(flat * weights).mean().item(), (flat * weights).abs().mean().item()]
    return [list(tensor.shape), int(finite.sum()), *sums]


def _why(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(
        report.longrepr if crash is None else f"{crash.path}:{crash.lineno} {crash.message}"
    )
