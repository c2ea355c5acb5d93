"""How wide the block table is: attention is tuned by it, and graphs know its address."""

from __future__ import annotations

import pytest

from tests.engine.serving_case import small_model
from torch_paged.config import Config
from torch_paged.decoder.step import DecoderStep
from torch_paged.engine.core import EngineCore
from torch_paged.ops.paged_attention.config import SHORT_TOKENS
from torch_paged.patches.families import read_spec


@pytest.mark.parametrize(
    ("max_model_len", "max_tokens", "width"),
    [
        (1 << 17, 200, SHORT_TOKENS),
        (1 << 17, SHORT_TOKENS, SHORT_TOKENS),
        (1 << 17, SHORT_TOKENS + 1, 1 << 17),
        (1 << 17, 1 << 18, 1 << 18),  # past the model's limit, as Hugging Face answers
        (1024, 200, 1024),
        (1024, 2000, 2000),
    ],
)
def test_tables_are_short_or_as_long_as_the_model_goes(
    max_model_len: int, max_tokens: int, width: int
) -> None:
    model = small_model()
    core = EngineCore(DecoderStep(model, read_spec(model)), Config(max_num_seqs=2), max_model_len)
    core.prepare(1, max_tokens, 1)
    assert core.state.max_blocks == -(-width // 16)
    core.prepare(1, 100, 1)
    assert core.state.max_blocks == -(-width // 16), "a shorter call must not move the table"
