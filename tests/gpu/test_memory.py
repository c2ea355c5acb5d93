"""Memory on the GPU: weights are not copied, release and restore give everything back."""

import gc

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torch_paged


def make_model():
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=2048,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def used_bytes():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def run(model, rows=2, length=64, new=32):
    ids = torch.randint(3, 32000, (rows, length), device="cuda")
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new)


def test_weights_are_not_copied_and_release_gives_all_back():
    model = make_model()
    weights = sum(p.nbytes for p in model.parameters())
    run(model)  # cuBLAS and modules of Hugging Face's own path
    start = used_bytes()
    torch_paged.accelerate(model, on_unsupported="raise")
    run(model)
    stats = torch_paged.stats(model)
    extra = used_bytes() - start - stats.kv_bytes - stats.graph_bytes
    assert extra < weights // 4, f"{extra} bytes beyond pool and graphs, weights are {weights}"
    torch_paged.release(model)
    assert used_bytes() - start <= start // 100
    run(model)
    torch_paged.restore(model)
    assert used_bytes() - start <= start // 100


def test_many_calls_stay_level():
    model = torch_paged.accelerate(make_model(), on_unsupported="raise")
    generator = torch.Generator().manual_seed(0)

    def some_calls(count):
        for _ in range(count):
            rows = int(torch.randint(1, 9, (), generator=generator))
            length = int(torch.randint(1, 400, (), generator=generator))
            run(model, rows, length, 5)
        return used_bytes(), torch_paged.stats(model).graphs

    # Every bucket twice: a prefill is captured when its shape comes back.
    for rows in (1, 2, 3, 5, 8):
        for length in (1, 9, 17, 33, 65, 97, 129, 193, 257, 385):
            run(model, rows, length, 5)
            run(model, rows, length, 5)
    before = some_calls(20)
    after = some_calls(80)
    assert after[1] == before[1]
    assert after[0] - before[0] <= before[0] // 100


def test_deleting_the_model_frees_everything():
    start = used_bytes()
    model = torch_paged.accelerate(make_model(), on_unsupported="raise")
    run(model)
    del model
    assert used_bytes() - start < 64 << 20
