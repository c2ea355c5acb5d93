"""What torch_paged is compared with: Hugging Face's own ways to generate, and vLLM."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import ContinuousBatchingConfig

from benchmarks import decode, shapes
from benchmarks.bench import Bench
from benchmarks.parity import Oracle
from benchmarks.record import Row
from benchmarks.runs import fresh_ids
from benchmarks.sections import Unit
from benchmarks.timing import differenced, synchronize

# Roughly milliseconds of a step of Hugging Face's loop, which the launches bound.
_HF_STEP_MS = {"0.6b": 45.0, "1b": 17.0, "8b": 35.0, shapes.TINY: 5.0}


def hf_eager_section(bench: Bench) -> Iterator[Unit]:
    """Hugging Face's `generate()`, nothing asked for."""
    scale = bench.scale
    for name in bench.models:
        for batch in bench.batches:
            key = f"hf_eager/{name}/batch {batch}"
            seconds = 1 + (scale.hf_repeats + 1) * (scale.hf_new + 2) * _HF_STEP_MS[name] / 1e3
            run = partial(_hf_eager, bench, name, batch, key)
            yield Unit(key, name, seconds * scale.expected_s, run, is_ours=False)


def _hf_eager(bench: Bench, name: str, batch: int, key: str) -> list[Row]:
    scale, model = bench.scale, bench.plain(name)
    times = decode.measure(
        model, batch, scale.hf_new, scale.hf_repeats, scale.prompt, **decode.GREEDY
    )
    return [bench.step_row(key, f"batch {batch}", model, batch, times, system="hf eager")]


def hf_batch_section(bench: Bench) -> Iterator[Unit]:
    """Hugging Face's `generate_batch()`, its defaults."""
    for name in bench.models:
        key = f"hf_generate_batch/{name}"
        seconds = 15 * bench.scale.expected_s
        yield Unit(key, name, seconds, partial(_hf_batch, bench, name, key), is_ours=False)


def _hf_batch(bench: Bench, name: str, key: str) -> list[Row]:
    model = bench.plain(name)
    count, new = bench.scale.batch_work
    # On a CPU it would take most of the memory for its cache.
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    config = None if bench.device.type == "cuda" else small
    seconds, ids = 0.0, None
    for _ in range(2):  # the first time warms up
        prompts = fresh_ids(model, count, bench.scale.prompt)
        synchronize(bench.device)
        start = time.perf_counter()
        outputs = model.generate_batch(
            prompts.tolist(),
            max_new_tokens=new,
            continuous_batching_config=config,
            **decode.GREEDY,
        )
        synchronize(bench.device)
        seconds = time.perf_counter() - start
        tokens = [out.generated_tokens for out in outputs.values()]
        if [len(row) for row in tokens] != [new] * count:
            raise RuntimeError(
                f"{count} x {new} tokens were asked for, {sum(map(len, tokens))} came"
            )
        ids = torch.cat([prompts, torch.tensor(tokens, device=bench.device)], dim=1)
    assert ids is not None
    bench.tidy()  # its cache took most of the memory
    with Oracle(model) as oracle:
        oracle.check_greedy(ids, bench.scale.prompt, key)
    speed, case = count * new / seconds, f"{count} requests of {new} tokens"
    return [bench.row(key, case, "tokens/s", speed, system="hf generate_batch")]


def hf_static_section(bench: Bench) -> Iterator[Unit]:
    """Hugging Face's static cache, which compiles the forward on a GPU."""
    batches = [batch for batch in bench.batches if batch in (1, 32)] or bench.batches[:1]
    for batch in batches:
        for name in bench.models:
            key = f"hf_static/{name}/batch {batch}"
            run = partial(_hf_static, bench, name, batch, key)
            yield Unit(key, name, 60 * bench.scale.expected_s, run, is_ours=False)


def _hf_static(bench: Bench, name: str, batch: int, key: str) -> list[Row]:
    scale, model = bench.scale, bench.plain(name)
    kwargs = decode.GREEDY | {"cache_implementation": "static"}
    start = time.perf_counter()
    # As long as the calls that are timed, or it would be compiled again for those.
    prompt = fresh_ids(model, batch, scale.prompt)
    ids = decode.generate(model, prompt, scale.static_new + 1, **kwargs)
    compiled_s = time.perf_counter() - start
    with Oracle(model) as oracle:
        oracle.check_greedy(ids, scale.prompt, key)
    times = decode.measure(
        model, batch, scale.static_new, scale.hf_repeats, scale.prompt, **kwargs
    )
    extra = {"first_call_s": compiled_s}
    what = "hf static cache + compile" if bench.device.type == "cuda" else "hf static cache"
    row = bench.step_row(key, f"batch {batch}", model, batch, times, system=what, extra=extra)
    if bench.device.type == "cuda":
        torch._dynamo.reset()
    return [row]


def vllm_section(bench: Bench) -> Iterator[Unit]:
    """vLLM with random weights of the same shapes, where it is installed."""
    if importlib.util.find_spec("vllm") is None:
        bench.record.left_out["vllm"] = "vLLM is not installed here"
        return
    for name in bench.models:
        key = f"vllm/{name}"
        seconds = 120 * bench.scale.expected_s
        yield Unit(key, name, seconds, partial(_vllm, bench, name, key), is_ours=False)


def _vllm(bench: Bench, name: str, key: str) -> list[Row]:
    """Its weights are its own, drawn at random: nothing here can check its tokens."""
    scale = bench.scale
    model = shapes.build(name, device="meta", dtype=bench.dtype)
    bench.drop_models()  # it takes a fixed share of the memory
    module: Any = importlib.import_module("vllm")
    with tempfile.TemporaryDirectory() as folder:
        config = shapes.config(name)
        config.dtype = bench.dtype
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        start = time.perf_counter()
        engine = module.LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096
        )
        started_s = time.perf_counter() - start
    rows = []
    for batch in bench.batches:
        call = partial(_vllm_call, module, engine, model.config.vocab_size, batch, scale.prompt)
        times = differenced(call, scale.new, scale.repeats)
        extra = {"start_up_s": started_s}
        case = f"batch {batch}"
        rows.append(bench.step_row(key, case, model, batch, times, system="vllm", extra=extra))
    del engine
    gc.collect()
    return rows


def _vllm_call(
    module: Any, engine: Any, vocab_size: int, batch: int, prompt: int, new: int
) -> float:
    """Return seconds of one call on fresh ids."""
    params = module.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    ids = torch.randint(vocab_size, (batch, prompt)).tolist()
    start = time.perf_counter()
    outputs = engine.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    count = sum(len(out.outputs[0].token_ids) for out in outputs)
    if count != batch * new:
        raise RuntimeError(f"vLLM returned {count} tokens, {batch * new} were asked for")
    return seconds


BASELINES = {
    "hf_eager": hf_eager_section,
    "hf_generate_batch": hf_batch_section,
    "vllm": vllm_section,
    "hf_static": hf_static_section,
}

__all__ = ["BASELINES"]
