"""Prompts with an image, with and without us: `python -m benchmarks.images [--models 3b 7b]`.

Whole `generate()` calls on Qwen2.5-VL's shapes with random weights: ms per token of a decode step,
prefill and set-up differenced out, and to the first token, vision tower included.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

import torch_paged
from benchmarks.ceiling import read_tbps
from benchmarks.timing import default_device, differenced, synchronize

IMAGE, VIDEO, START, END = 5, 6, 7, 8
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
# Fields of the text model, then those of the vision tower; images are of so many patches a side.
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "3b": (
        {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "rope_parameters": {**_ROPE, "mrope_section": [16, 24, 24]},
        },
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
        32,
    ),
    "7b": (
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "rope_parameters": {**_ROPE, "mrope_section": [16, 24, 24]},
        },
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
        32,
    ),
    "tiny": (
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
            "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]},
        },
        {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2},
        8,
    ),
}


def build(name: str, device: torch.device) -> Any:
    """Build the model with random weights of a fixed seed, bfloat16 on a GPU."""
    text, vision, _ = SHAPES[name]
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config={**vision, "out_hidden_size": text["hidden_size"]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=name == "3b",
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with torch.device(device):
            model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def fresh_inputs(model: Any, side: int, batch: int, text: int) -> dict[str, Tensor]:
    """Return what a processor would for prompts of an image and `text` tokens, never seen."""
    device, vision = model.device, model.config.vision_config
    count = (side // vision.spatial_merge_size) ** 2
    image = torch.tensor([START, *[IMAGE] * count, END], device=device).expand(batch, -1)
    vocab_size = model.config.get_text_config().vocab_size
    words = torch.randint(100, vocab_size, (batch, text), device=device)
    ids = torch.cat([words[:, : text // 2], image, words[:, text // 2 :]], 1)
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(batch * side**2, width, device=device, dtype=model.dtype),
        "image_grid_thw": torch.tensor([[1, side, side]] * batch, device=device),
    }


def measure(
    model: Any, side: int, batch: int, new: int, repeats: int, text: int
) -> dict[str, float]:
    """Return the figures of `differenced` for greedy calls."""

    def call(num_tokens: int) -> float:
        inputs = fresh_inputs(model, side, batch, text)
        synchronize(model.device)
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        synchronize(model.device)
        seconds = time.perf_counter() - start
        if out.shape[1] != inputs["input_ids"].shape[1] + num_tokens:
            raise RuntimeError(f"generate() must give {num_tokens} tokens; leave end tokens off")
        return seconds

    return differenced(call, new, repeats)


def compare(name: str, batch: int, new: int, repeats: int, text: int) -> list[dict[str, Any]]:
    """Measure one model with and without us and print both."""
    model, side = build(name, default_device()), SHAPES[name][2]
    rows: list[dict[str, Any]] = []
    for system in ("transformers", "torch_paged"):
        if system == "torch_paged":
            torch_paged.accelerate(model, on_unsupported="raise")
        row: dict[str, Any] = {"model": name, "batch": batch, "system": system}
        row |= measure(model, side, batch, new, repeats, text)
        rows.append(row)
        print(
            f"{name:5} batch {batch:3}, {system:12}: {row['ms']:.4f} ms a token "
            f"({row['low_ms']:.4f} to {row['high_ms']:.4f}), first token after "
            f"{row['first_token_ms']:.1f} ms",
            flush=True,
        )
    last = torch_paged.explain(model).last_call
    if last is None or last.path != "fused":
        raise RuntimeError(f"the call must take the fused path, got {last}")
    torch_paged.restore(model)
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    """Measure the shapes and batches asked for; JSON to --json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=["3b", "7b"], choices=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--text", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.models:
        for batch in args.batches:
            rows += compare(name, batch, args.new, args.repeats, args.text)
    if args.json:
        record: dict[str, Any] = {"torch": torch.__version__, "rows": rows}
        if torch.cuda.is_available():
            record |= {"gpu": torch.cuda.get_device_name(), "read_tbps": read_tbps()}
        record["command"] = "python -m benchmarks.images"
        os.makedirs(os.path.dirname(args.json) or ".", exist_ok=True)
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
