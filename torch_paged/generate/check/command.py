"""The command ``check``: where a model's step first parts from Hugging Face's forward."""

from __future__ import annotations

import argparse
import sys

import torch
import transformers

from torch_paged.generate.check.comparison import PROMPT_TOKENS, compare_model, model_class
from torch_paged.generate.check.load import load_model
from torch_paged.generate.check.text import format_comparison

_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a name on the hub, or a model type, built tiny"
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="default: float32")
    parser.add_argument(
        "--device", type=_device, help="default: cuda where there is one, else cpu"
    )
    parser.add_argument(
        "--tokens",
        type=_count,
        default=PROMPT_TOKENS,
        metavar="N",
        help=f"length of the random prompt; default: {PROMPT_TOKENS}",
    )
    parser.add_argument("--all", action="store_true", help="print every layer, not the worst one")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison; 1 if something parts, 2 if there is nothing to compare."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        model = load_model(
            arguments.model,
            dtype=getattr(torch, arguments.dtype),
            device=device,
            trust_remote_code=arguments.trust_remote_code,
        )
        print(f"model     {model_class(model)}, {arguments.dtype} on {device}")
        found = compare_model(model, arguments.tokens)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        transformers.logging.set_verbosity(before)
    print(format_comparison(found, every_point=arguments.all))
    if found.tier == "eager":
        return 2
    return 0 if found.agrees else 1


def _device(text: str) -> str:
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(
            f"must be a device that torch can use here, got {text}: {why}"
        ) from None
    return text


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {count}")
    return count


__all__ = ["add_arguments", "run"]
