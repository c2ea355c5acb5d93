"""Folding of equal layers in the printed plan."""

from transformers import Gemma2Config, LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from torch_paged.decoder.fusion import FusionProfile, always, fuse
from torch_paged.decoder.lowering import lower
from torch_paged.decoder.plan_text import fold_layers
from torch_paged.patches.families import read_spec

_DIMS = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def folded(model, linears):
    return fold_layers(
        fuse(lower(read_spec(model), "decode"), FusionProfile(always if linears else None))
    )


def test_equal_layers_are_printed_once():
    model = LlamaForCausalLM(LlamaConfig(**_DIMS, num_hidden_layers=12))
    text = folded(model, linears=True)
    assert "layer 0:" in text and "layers i = 1 to 11:" in text
    assert len(text.splitlines()) == 2 + 2 * (1 + 5) + 1
    assert "model.layers.i.mlp.down_proj" in text
    assert "h[i-1]" in text
    assert "attention[i: 2/1x16]" in text
    assert text.splitlines()[-1].startswith("logits = rms_norm+linear[lm_head](h11")


def test_layers_that_differ_stay_apart():
    config = Gemma2Config(**_DIMS, head_dim=16, num_hidden_layers=6, sliding_window=8)
    text = folded(Gemma2ForCausalLM(config), linears=False)
    # Window and full layers alternate, so no two neighbours are equal.
    assert text.count("layer ") == 6 and "layers i" not in text
    assert text.count("window=8") == 3
