"""Evaluate a model with lm-evaluation-harness, on torch_paged's engine.

    pip install lm_eval
    python examples/lm_eval_adapter.py --model Qwen/Qwen3-0.6B --tasks hellaswag,gsm8k --limit 100

or, with a model and a tokenizer in memory::

    results = lm_eval.simple_evaluate(model=TorchPagedLM(model, tokenizer), tasks=["hellaswag"])

Requests go into one engine as they come: nothing is padded, sorted or grouped, and no batch size
has to be found. Numbers are those of `lm_eval --model hf`, whose settings of the tokenizer are
taken over, with one difference: a text longer than the model's limit is cut two tokens earlier.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from loading import add_model_arguments, complain, find_device, load, packaged_model
from tqdm import tqdm

import torch_paged

try:
    from lm_eval.api.model import LM
except ImportError as error:
    if error.name is None or error.name.split(".")[0] != "lm_eval":
        raise  # it is there, and something that it needs is not
    raise ImportError(
        "examples/lm_eval_adapter.py needs lm-evaluation-harness, which is not installed; run "
        "'pip install lm_eval'",
        name=error.name,
    ) from None

# Requests handed to the engine ahead of the rows that run.
_AHEAD = 2
_DEFAULT_LIMIT = 2048
_DEFAULT_NEW_TOKENS = 256
# Names under which tasks say how many tokens to generate, the first one counts.
_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")

# A key of the caller's, the tokens of a prompt, and what to ask of the engine.
Query = tuple[int, list[int], dict[str, Any]]


class TorchPagedLM(LM):
    """A causal language model on an engine, as lm-evaluation-harness wants it.

    Args:
        max_length: most tokens that a scored token may see; None: what the model allows.
        add_bos_token: whether texts begin with the tokenizer's first token; None: as it likes.
        config: fields of `torch_paged.Config`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        max_num_seqs: int = 256,
        **config: Any,
    ) -> None:
        super().__init__()
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", _DEFAULT_LIMIT)
        # The engine wants room for the token itself and for the one that it samples.
        self.max_length = limit - 2 if max_length is None else max_length
        if not 1 <= self.max_length <= limit - 2:
            raise ValueError(
                f"max_length must be 1 to {limit - 2}, two less than the model's limit, got "
                f"{max_length}; leave it out for all that the model allows"
            )
        self.tokenizer = tokenizer
        self._add_bos = add_bos_token
        self._in_line = _AHEAD * max_num_seqs
        self._engine = torch_paged.Engine(
            model, max_num_seqs=max_num_seqs, max_model_len=self.max_length + 2, **config
        )

    def close(self) -> None:
        """Give the engine back."""
        self._engine.close()

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise ValueError(
            "the tokenizer has neither a bos nor an eos token, one of which stands before a text "
            "without context; set tokenizer.bos_token"
        )

    @property
    def tokenizer_name(self) -> str:
        """Names the chat template in the harness's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the text of the tokenizer's template, for the harness's records."""
        if not chat_template:
            return None
        name = chat_template if isinstance(chat_template, str) else None
        return str(self.tokenizer.get_chat_template(name))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write a chat as the model reads it."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return how likely each continuation of a context is, and whether greedy finds it."""
        pairs = [self._encode_pair(*request.args) for request in requests]
        results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        queries: list[Query] = []
        for key, (context, continuation) in enumerate(pairs):
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"the continuation of request {key} has {len(continuation)} tokens, more than "
                    f"max_length={self.max_length}; shorten it"
                )
            ids = (context + continuation)[-self.max_length - 1 :]
            queries.append((key, ids, _scoring(ids, len(continuation))))
        for key, output in self._serve(queries, "loglikelihood", disable_tqdm):
            results[key] = _score(output, len(pairs[key][1]))
            self.cache_hook.add_partial("loglikelihood", requests[key].args, results[key])
        return results

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return how likely each text is; long ones are read in windows."""
        queries: list[Query] = []
        windows: list[tuple[int, int]] = []  # the request, and how many last tokens count
        for key, request in enumerate(requests):
            tokens = self._encode(request.args[0])
            for ids, num_scored in _windows(tokens, self.prefix_token_id, self.max_length):
                queries.append((len(windows), ids, _scoring(ids, num_scored)))
                windows.append((key, num_scored))
        parts: list[list[float]] = [[] for _ in requests]
        for index, output in self._serve(queries, "loglikelihood_rolling", disable_tqdm):
            key, num_scored = windows[index]
            parts[key].append(_score(output, num_scored)[0])
        results = [math.fsum(part) for part in parts]  # whichever window ended first
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return for each (context, fields) what the model writes up to the first stop string."""
        results = [""] * len(requests)
        queries: list[Query] = []
        stops: list[list[str]] = []
        for key, request in enumerate(requests):
            context, fields = request.args
            asked, until = self._generation(dict(fields))
            room = self.max_length + 2 - asked["max_new_tokens"]
            if room < 1:
                raise ValueError(
                    f"request {key} generates {asked['max_new_tokens']} tokens, which leaves no "
                    f"room for a prompt; lower {_NEW_TOKENS[0]} below {self.max_length + 2}"
                )
            queries.append((key, self._encode(context)[-room:] or [self.prefix_token_id], asked))
            stops.append(until)
        for key, output in self._serve(queries, "generate_until", disable_tqdm):
            text = self.tokenizer.decode(list(output.token_ids), skip_special_tokens=True)
            for stop in stops[key]:
                text = text.split(stop, 1)[0]
            results[key] = text
            self.cache_hook.add_partial("generate_until", requests[key].args, text)
        return results

    def _serve(
        self, queries: Sequence[Query], name: str, quiet: bool
    ) -> Iterator[tuple[int, torch_paged.RequestOutput]]:
        """Run queries on the engine; yield each key with the last output as they end."""
        num_added = 0
        keys: dict[Any, int] = {}  # of the requests in the engine
        with tqdm(total=len(queries), desc=name, disable=quiet or None) as bar:
            try:
                while num_added < len(queries) or keys:
                    room = self._in_line - len(keys)
                    for key, ids, fields in queries[num_added : num_added + room]:
                        keys[self._engine.add_request(ids, **fields)] = key
                        num_added += 1
                    for output in self._engine.step():
                        if not output.finished or output.request_id not in keys:
                            continue
                        key = keys.pop(output.request_id)
                        if output.finish_reason in ("error", "cancelled"):
                            raise RuntimeError(f"{name}, request {key}: {output.error}")
                        yield key, output
                        bar.update(1)
            finally:
                for request_id in keys:
                    self._engine.cancel(request_id)

    def _encode(self, text: str, *, is_start: bool = True) -> list[int]:
        flags: dict[str, Any] = {} if self._add_bos is None else {"add_special_tokens": False}
        bos = getattr(self.tokenizer, "bos_token", None)
        if not is_start or (bos and text.startswith(bos)):
            flags = {"add_special_tokens": False}
        elif self._add_bos:
            flags = {"add_special_tokens": True}
        return list(self.tokenizer(text, **flags).input_ids)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of both, cut where the tokens of the context alone end."""
        if not context:
            ids = self._encode(continuation, is_start=False)
            if ids and ids[0] == self.prefix_token_id:
                return ids[:1], ids[1:]
            return [self.prefix_token_id], ids
        # A word's token has its space in front.
        stripped = context.rstrip()
        continuation, context = context[len(stripped) :] + continuation, stripped
        whole, first = self._encode(context + continuation), self._encode(context)
        return first or [self.prefix_token_id], whole[len(first) :]

    def _generation(self, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Turn a task's fields into those of the engine, and the strings to stop at."""
        limits = [fields.pop(name, None) for name in _NEW_TOKENS]
        num_tokens = next((int(n) for n in limits if n is not None), _DEFAULT_NEW_TOKENS)
        until = fields.pop("until", None) or []
        until = [until] if isinstance(until, str) else [stop for stop in until if stop]
        temperature = fields.pop("temperature", None)
        sampled = fields.pop("do_sample", temperature is not None and temperature > 0)
        asked: dict[str, Any] = {**fields, "max_new_tokens": num_tokens, "do_sample": False}
        if sampled and temperature != 0:
            asked["do_sample"] = True
            asked["temperature"] = 1.0 if temperature is None else temperature
        if until:
            asked.update(stop_strings=until, tokenizer=self.tokenizer)
        if self.tokenizer.eos_token_id is not None:
            asked.setdefault("stop_token_ids", [self.tokenizer.eos_token_id])
        return asked, until


def _scoring(ids: list[int], num_scored: int) -> dict[str, Any]:
    """Return what to ask of the engine for scores of the last tokens of a prompt.

    Blocks of a context are computed once for all of its continuations.
    """
    asked: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False}
    if num_scored:
        asked |= {"prompt_logprobs": 1, "prompt_logprobs_start": len(ids) - num_scored}
    return asked


def _score(output: torch_paged.RequestOutput, count: int) -> tuple[float, bool]:
    """Return how likely the last `count` tokens of a prompt are, and whether greedy finds them."""
    if count == 0:
        return 0.0, True
    assert output.prompt_ids is not None
    assert output.prompt_logprobs is not None and output.prompt_top_logprobs is not None
    values = output.prompt_logprobs[-count:]
    best = output.prompt_top_logprobs[-count:]
    greedy = all(
        top is not None and top[0][0] == token
        for top, token in zip(best, output.prompt_ids[-count:], strict=True)
    )
    return sum(value for value in values if value is not None), greedy


def _windows(tokens: list[int], prefix: int, size: int) -> Iterator[tuple[list[int], int]]:
    """Yield windows of a text and how many of their last tokens count: each counts once.

    A token sees at most `size` tokens before it; the last window is moved back to be full.
    """
    for start in range(0, len(tokens), size):
        end = min(start + size, len(tokens))
        # The window begins with a token that is read and not scored.
        before = end - size - 1
        yield (tokens[before:end] if before >= 0 else [prefix, *tokens[:end]]), end - start


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    parser.add_argument("--tasks", required=True, help="e.g. hellaswag,gsm8k")
    parser.add_argument("--limit", type=int, help="examples of each task (default: all)")
    parser.add_argument("--num-fewshot", type=int, help="default: the task's own")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="default: 256")
    parser.add_argument(
        "--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto"
    )
    options = parser.parse_args()
    import lm_eval

    device = find_device(options.device)
    model, tokenizer = load(options.model or packaged_model(), device, options.dtype)
    adapter = TorchPagedLM(model, tokenizer, max_num_seqs=options.max_num_seqs)
    try:
        found = lm_eval.simple_evaluate(
            model=adapter,
            tasks=options.tasks.split(","),
            limit=options.limit,
            num_fewshot=options.num_fewshot,
        )
    except (KeyError, ValueError) as error:
        complain(str(error))
    finally:
        adapter.close()
    print(json.dumps(found["results"], indent=2, default=str))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
