from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import torch_paged
from torch_paged.config import Config


def test_defaults_are_the_documented_ones() -> None:
    assert dataclasses.asdict(Config()) == {
        "block_size": 16,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "max_model_len": None,
        "kv_cache_memory": None,
        "gpu_memory_utilization": 0.9,
        "cpu_offload_space": 0.0,
        "batch_buckets": None,
        "cuda_graphs": True,
        "enable_prefix_caching": True,
        "kv_cache_dtype": "auto",
        "seed": None,
        "verify": True,
        "on_unsupported": "fallback",
        "logprobs_mode": "raw_logprobs",
        "lag": 4,
    }


def test_config_is_exported_at_the_top() -> None:
    assert torch_paged.Config is Config


VALID = [
    {"block_size": 8},
    {"block_size": 32},
    {"max_num_seqs": 1},
    {"max_num_batched_tokens": 1},
    {"max_model_len": 1},
    {"kv_cache_memory": 1 << 30},
    {"kv_cache_memory": 0.25},
    {"kv_cache_memory": 1.0},
    {"cpu_offload_space": 0},
    {"cpu_offload_space": 0.5},
    {"cpu_offload_space": 64},
    {"gpu_memory_utilization": 1.0},
    {"batch_buckets": (1, 3, 256)},
    {"seed": 0},
    {"seed": (1 << 64) - 1},
    {"lag": 0},
    {"lag": 64},
    {"on_unsupported": "raise"},
    {"logprobs_mode": "processed_logprobs"},
    {"kv_cache_dtype": "float16"},
    {"cuda_graphs": False, "verify": False, "enable_prefix_caching": False},
]


@pytest.mark.parametrize("fields", VALID, ids=str)
def test_valid_value_is_kept(fields: dict[str, Any]) -> None:
    config = Config(**fields)
    assert {name: getattr(config, name) for name in fields} == fields


# (fields, exception, what the message must say: the field, what was got, the remedy)
INVALID = [
    ({"block_size": 24}, ValueError, ["block_size", "8, 16 or 32", "24", "16 is the default"]),
    ({"block_size": 16.0}, TypeError, ["block_size", "integer", "16.0", "float", "=16"]),
    ({"block_size": "16"}, TypeError, ["8, 16 or 32", "'16'", "str", "pass block_size=16"]),
    ({"block_size": "big"}, TypeError, ["8, 16 or 32", "'big'", "pass block_size=16"]),
    ({"block_size": True}, TypeError, ["block_size", "integer", "True", "bool"]),
    ({"max_num_seqs": 0}, ValueError, ["max_num_seqs", "at least 1", "got 0", "256"]),
    ({"max_num_seqs": "8"}, TypeError, ["max_num_seqs", "integer", "'8'", "str", "seqs=8"]),
    ({"max_num_seqs": 10**9}, ValueError, ["max_num_seqs", "at most 65536", "1000000000", "256"]),
    ({"max_model_len": 10**12}, ValueError, ["max_model_len", "at most 16777216", "None"]),
    ({"max_num_batched_tokens": -1}, ValueError, ["max_num_batched_tokens", "at least 1", "-1"]),
    ({"max_model_len": 0}, ValueError, ["max_model_len", "at least 1", "got 0"]),
    ({"kv_cache_memory": 1}, ValueError, ["kv_cache_memory", "1048576", "got 1", "1.0"]),
    ({"kv_cache_memory": -1}, ValueError, ["kv_cache_memory", "at least", "-1"]),
    ({"kv_cache_memory": 1.5}, ValueError, ["kv_cache_memory", "(0, 1]", "1.5", "int"]),
    ({"kv_cache_memory": 0.0}, ValueError, ["kv_cache_memory", "(0, 1]", "0.0"]),
    ({"kv_cache_memory": float("nan")}, ValueError, ["kv_cache_memory", "(0, 1]", "nan"]),
    (
        {"kv_cache_memory": "1GB"},
        TypeError,
        ["bytes as an int, or a fraction as a float", "'1GB'", "str", "4 << 30 for 4 GiB"],
    ),
    ({"cpu_offload_space": -1}, ValueError, ["cpu_offload_space", "GiB", "-1", "4.0"]),
    ({"cpu_offload_space": 4 << 30}, ValueError, ["GiB", "at most", "4294967296", "4.0"]),
    ({"cpu_offload_space": float("nan")}, ValueError, ["cpu_offload_space", "nan"]),
    ({"cpu_offload_space": float("inf")}, ValueError, ["cpu_offload_space", "inf"]),
    ({"cpu_offload_space": None}, TypeError, ["cpu_offload_space", "GiB", "None", "0 to have"]),
    ({"cpu_offload_space": "4GB"}, TypeError, ["cpu_offload_space", "'4GB'", "str", "4.0"]),
    ({"cpu_offload_space": True}, TypeError, ["cpu_offload_space", "True", "bool"]),
    ({"kv_cache_memory": True}, TypeError, ["bytes as an int", "True", "bool", "4 << 30"]),
    ({"gpu_memory_utilization": 90}, ValueError, ["gpu_memory_utilization", "(0, 1]", "90"]),
    ({"gpu_memory_utilization": None}, TypeError, ["gpu_memory_utilization", "(0, 1]", "None"]),
    ({"batch_buckets": 8}, TypeError, ["batch_buckets", "batch sizes", "8", "(1, 2, 4, 8)"]),
    ({"batch_buckets": "12"}, TypeError, ["batch_buckets", "'12'"]),
    ({"batch_buckets": ()}, ValueError, ["batch_buckets", "batch sizes", "()"]),
    ({"batch_buckets": (2, 2)}, ValueError, ["batch_buckets", "increasing", "(2, 2)"]),
    ({"batch_buckets": (0, 1)}, ValueError, ["batch_buckets", "at least 1", "got 0"]),
    ({"batch_buckets": (1, 2.5)}, TypeError, ["batch_buckets", "integers", "2.5", "(1, 2, 4, 8)"]),
    ({"kv_cache_dtype": None}, ValueError, ["kv_cache_dtype", "got None", "'auto'"]),
    (
        {"batch_buckets": (1, 512)},
        ValueError,
        ["batch_buckets", "max_num_seqs=256", "(1, 512)", "max_num_seqs=512"],
    ),
    ({"cuda_graphs": 1}, TypeError, ["cuda_graphs", "True or False", "1", "cuda_graphs=True"]),
    ({"enable_prefix_caching": None}, TypeError, ["enable_prefix_caching", "None", "=False"]),
    ({"verify": "yes"}, TypeError, ["verify", "True or False", "'yes'"]),
    ({"kv_cache_dtype": "floatt16"}, ValueError, ["kv_cache_dtype", "did you mean 'float16'?"]),
    ({"kv_cache_dtype": torch.int8}, ValueError, ["kv_cache_dtype", "'bfloat16'", "'int8'"]),
    ({"logprobs_mode": "processed"}, ValueError, ["logprobs_mode", "'processed_logprobs'"]),
    ({"on_unsupported": "rase"}, ValueError, ["on_unsupported", "did you mean 'raise'?"]),
    ({"seed": -1}, ValueError, ["seed", "at least 0", "-1"]),
    ({"seed": 1 << 64}, ValueError, ["seed", "at most", str(1 << 64)]),
    ({"lag": -1}, ValueError, ["lag", "at least 0", "-1", "4"]),
    ({"lag": 65}, ValueError, ["lag", "at most 64", "65"]),
]


@pytest.mark.parametrize(("fields", "error", "parts"), INVALID, ids=[str(c[0]) for c in INVALID])
def test_wrong_value_raises_with_the_field_and_the_remedy(
    fields: dict[str, Any], error: type[Exception], parts: list[str]
) -> None:
    with pytest.raises(error) as raised:
        Config(**fields)
    message = str(raised.value)
    assert message.startswith(f"Config.{next(iter(fields))} must be ")
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize("kind", [Fraction, np.float32, np.float64])
def test_numbers_of_any_library_are_numbers(kind: Any) -> None:
    half = kind(1) / kind(2)
    config = Config(cpu_offload_space=half, gpu_memory_utilization=half, kv_cache_memory=half)
    for value in (config.cpu_offload_space, config.gpu_memory_utilization, config.kv_cache_memory):
        assert type(value) is float and value == 0.5
    assert Config(cpu_offload_space=np.int64(2)).cpu_offload_space == 2.0


def test_buckets_become_a_tuple() -> None:
    assert Config(batch_buckets=[1, 2]).batch_buckets == (1, 2)


def test_integer_of_another_library_becomes_an_int() -> None:
    value = Config(max_num_seqs=torch.tensor(7)).max_num_seqs  # type: ignore[arg-type]
    assert type(value) is int and value == 7


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Config)])
@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([[1, 2], [3, 4]]),
        torch.tensor([1, 2]).numpy()[:, None],
        torch.tensor(0.5),
        torch.tensor(1, device="meta"),
    ],
    ids=["tensor", "array", "scalar", "meta"],
)
def test_tensor_where_none_belongs_is_named(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        Config(**{name: value})
    assert f"Config.{name} must be" in str(raised.value) and "; " in str(raised.value)


def test_torch_dtype_becomes_its_name() -> None:
    assert Config(kv_cache_dtype=torch.bfloat16).kv_cache_dtype == "bfloat16"  # type: ignore[arg-type]


def test_config_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().lag = 1  # type: ignore[misc]


def test_equal_configs_hash_alike_and_survive_pickle_and_copy() -> None:
    config = Config(batch_buckets=[1, 2], kv_cache_memory=0.5)
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert other == config and hash(other) == hash(config)


def test_replace_changes_one_field_and_leaves_the_original() -> None:
    config = Config(lag=0)
    assert config.replace(max_num_seqs=4) == Config(lag=0, max_num_seqs=4)
    assert config == Config(lag=0)


def test_replace_checks_the_new_value() -> None:
    with pytest.raises(ValueError, match=r"Config\.lag must be at least 0"):
        Config().replace(lag=-1)


def test_replace_checks_fields_against_each_other() -> None:
    with pytest.raises(ValueError, match="max_num_seqs=4"):
        Config(batch_buckets=(1, 8)).replace(max_num_seqs=4)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("blocksize", "block_size"),
        ("max_num_seq", "max_num_seqs"),
        ("cudagraphs", "cuda_graphs"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
    ],
)
def test_replace_rejects_unknown_name_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(TypeError, match=f"no field '{name}'; did you mean {nearest}"):
        Config().replace(**{name: 1})


def test_replace_lists_the_fields_when_nothing_is_near() -> None:
    with pytest.raises(TypeError, match="no field 'zzz'.*block_size, max_num_seqs.*lag"):
        Config().replace(zzz=1)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_num_seq", "did you mean max_num_seqs"),
        ("gpu_memory_utilisation", "did you mean gpu_memory_utilization"),
        ("zzz", "Its fields are block_size, max_num_seqs"),
    ],
)
def test_a_misspelt_field_is_told_its_nearest(name: str, nearest: str) -> None:
    with pytest.raises(TypeError, match=f"Config has no field '{name}'") as raised:
        Config(**{name: 1})
    assert nearest in str(raised.value)


def test_values_without_a_name_are_refused_with_the_remedy() -> None:
    with pytest.raises(
        TypeError, match=r"by name, got \(16,\); pass e.g. Config\(block_size=16\)"
    ):
        Config(16)  # type: ignore[misc]


def test_the_signature_names_the_fields() -> None:
    names = list(inspect.signature(Config).parameters)
    assert names == [field.name for field in dataclasses.fields(Config)]
