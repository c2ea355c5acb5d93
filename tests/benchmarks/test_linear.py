"""What the sweep over linears tries for a layer."""

from __future__ import annotations

import pytest

from benchmarks import ops_linear_cases
from benchmarks.ops_linear_cases import MODELS, candidates, chosen, is_one_of
from torch_paged.ops.fused_linear.configs import AheadGemmConfig, TileGemmConfig
from torch_paged.ops.fused_linear.wide_config import SHARED_BYTES, WideGemmConfig, stage_bytes

CASES = [
    pytest.param(layer, num_tokens, id=f"{name}-{layer.name}-{num_tokens}")
    for name in ("0.6b", "1b", "8b")
    for layer in (*MODELS[name].layers, MODELS[name].head)
    for num_tokens in (9, 16, 32, 64)
]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_linear_cases, "device_key", lambda device: (90, 132))


@pytest.mark.parametrize(("layer", "num_tokens"), CASES)
def test_few_rows_try_tile_copies_that_fit_beside_the_other_kernels(
    layer: ops_linear_cases.Layer, num_tokens: int
) -> None:
    found = candidates(layer, num_tokens)
    assert found[0] == chosen(layer, num_tokens) and len(set(found)) == len(found)
    assert any(isinstance(config, TileGemmConfig) for config in found)
    wide = [config for config in found if isinstance(config, WideGemmConfig)]
    assert 4 <= len(wide) <= 10 and len({config[:2] for config in wide}) >= 2
    streams = 2 if layer.gated else 1
    for config in wide:
        stage = stage_bytes(config.rows * streams, config.tokens, config.block_k)
        assert config.stages >= 2 and config.stages * stage <= SHARED_BYTES
    for config in found:
        if isinstance(config, AheadGemmConfig):
            assert config.block_k * config.splits >= layer.in_features
            tile = stage_bytes(config.rows * streams, max(num_tokens, 16), config.block_k)
            programs = layer.num_rows // (config.rows * streams) * config.splits
            assert tile <= SHARED_BYTES and programs * tile <= 132 * SHARED_BYTES


def test_layers_whose_weights_fit_the_multiprocessors_try_them_ahead() -> None:
    for name, fits in (("0.6b", 4), ("1b", 2), ("8b", 0)):
        ahead = [
            any(isinstance(config, AheadGemmConfig) for config in candidates(layer, 32))
            for layer in MODELS[name].layers
        ]
        assert sum(ahead) == fits


@pytest.mark.parametrize(("layer", "num_tokens"), CASES)
def test_a_sweep_of_some_kinds_tries_these_and_the_chosen_one(
    layer: ops_linear_cases.Layer, num_tokens: int
) -> None:
    kinds = ["wide_gemm", "ahead_gemm"]
    some, found = candidates(layer, num_tokens, kinds), candidates(layer, num_tokens)
    assert some[0] == found[0]
    assert some[1:] == [config for config in found[1:] if is_one_of(config, kinds)]
