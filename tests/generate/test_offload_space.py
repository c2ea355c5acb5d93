"""What transformers' configuration of continuous batching says of host memory counts."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import ContinuousBatchingConfig

import torch_paged
from torch_paged.generate import offload_space
from torch_paged.generate.offload_space import wanted_host_bytes
from torch_paged.generate.registry import find_session

sys.path.append(str(Path(__file__).resolve().parents[1] / "engine"))

from serving_case import Answers, ids_of, small_model  # noqa: E402

GIB = 1 << 30
AVAILABLE = 10 * GIB
KNOWS_SPACE = hasattr(ContinuousBatchingConfig(), "cpu_offload_space")


@pytest.fixture
def model(accelerate: Any) -> Any:
    return accelerate(copy.deepcopy(small_model()))


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_space, "available_bytes", lambda: AVAILABLE)


def batching(space: object, threshold: object = 0.8) -> Any:
    return SimpleNamespace(cpu_offload_space=space, cpu_offload_space_safety_threshold=threshold)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (SimpleNamespace(), 0),  # a release that has no such fields
        (batching(0.0), 0),
        (batching(0.0, "no matter"), 0),
        (batching(2), 2 * GIB),
        (batching(0.5, 1), GIB // 2),
        (batching(9.0), int(0.8 * AVAILABLE)),
        (batching(9.0, 0.0), 0),
        (batching(None), int(0.8 * AVAILABLE)),
        (batching(None, 0.25), AVAILABLE // 4),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
@pytest.mark.usefixtures("available")
def test_space_is_in_gibibytes_and_limited_by_the_threshold(given: Any, expected: int) -> None:
    assert wanted_host_bytes(small_model(), given) == expected


@pytest.mark.usefixtures("available")
def test_more_than_may_be_taken_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    wanted_host_bytes(small_model(), batching(8))
    assert not caplog.text
    wanted_host_bytes(small_model(), batching(8.5))
    assert "cpu_offload_space=8.5 GiB is more than may be taken" in caplog.text


@pytest.mark.usefixtures("available")
def test_the_larger_of_both_configurations_counts(accelerate: Any) -> None:
    model = accelerate(copy.deepcopy(small_model()), cpu_offload_space=1.0)
    assert wanted_host_bytes(model, batching(0.0)) == GIB
    assert wanted_host_bytes(model, batching(0.5)) == GIB
    assert wanted_host_bytes(model, batching(2.0)) == 2 * GIB


def test_a_machine_that_does_not_tell_its_memory_gives_what_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload_space, "available_bytes", lambda: None)
    assert wanted_host_bytes(small_model(), batching(300.0)) == 300 * GIB
    with pytest.raises(ValueError, match=r"cpu_offload_space=None .* pass the GiB"):
        wanted_host_bytes(small_model(), batching(None))


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (batching(-1), ValueError, "cpu_offload_space must be a number of GiB"),
        (batching("4"), TypeError, "cpu_offload_space must be a number of GiB"),
        (
            batching(1, 1.5),
            ValueError,
            r"safety_threshold must be a fraction in \[0, 1\], got 1.5",
        ),
        (batching(1, None), TypeError, r"safety_threshold must be .* pass e.g. 0.8"),
    ],
)
def test_what_is_no_space_is_refused(given: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        wanted_host_bytes(small_model(), given)


@pytest.mark.skipif(not KNOWS_SPACE, reason="this transformers has no cpu_offload_space")
def test_generate_batch_swaps_where_its_configuration_says_so(model: Any) -> None:
    answers = Answers(small_model())
    prompts = [ids_of(n, n) for n in (5, 16, 17, 31)]
    session = find_session(model)
    assert session is not None and session.core is not None
    session.core.prepare(1, 1, 1)
    session.core.pool.max_bytes = 8 * session.core.pool.block_bytes
    swaps = []
    for space in (0.0, 1e-3, 0.0):
        results = model.generate_batch(
            prompts,
            max_new_tokens=40,
            continuous_batching_config=ContinuousBatchingConfig(cpu_offload_space=space),
        )
        for ids, result in zip(prompts, results.values(), strict=True):
            assert result.generated_tokens == answers(ids, 40)
        swaps.append(torch_paged.stats(model).swaps)
    # The last call does not ask for it, and the model's own configuration did not change.
    assert 0 == swaps[0] < swaps[1] == swaps[2]
    assert session.config.cpu_offload_space == 0
