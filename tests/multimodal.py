"""Tiny random models that read images, and prompts with images of several sizes for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from models import BASE, left_pad, prompt
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3VLConfig,
    SiglipVisionConfig,
)

IMAGE, VIDEO, START, END = 250, 251, 252, 253
_TEXT = {**BASE, "vocab_size": 257}
# Weights are drawn at this scale in the vision tower: images must matter, and not drown the text.
_VISION = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
_SPECIAL = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


class Kind(NamedTuple):
    """A kind of model: how its config is made, a weight seed without near ties, its grids."""

    config: Any
    seed: int
    grids: bool


def _llava(text: type[PretrainedConfig], **fields: Any) -> LlavaConfig:
    vision = CLIPVisionConfig(
        **_VISION,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=12,
        patch_size=4,
        projection_dim=32,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text(**_TEXT, **fields),
        image_token_index=IMAGE,
        image_seq_length=9,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )


def _gemma3() -> Gemma3Config:
    text = Gemma3TextConfig(
        **_TEXT,
        head_dim=16,
        sliding_window=17,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    vision = SiglipVisionConfig(
        **_VISION, num_hidden_layers=2, num_attention_heads=2, image_size=12, patch_size=4
    )
    return Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=9,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
        tie_word_embeddings=False,
        initializer_range=0.35,
    )


def _qwen_vision(**fields: Any) -> dict[str, Any]:
    return {
        "depth": 2,
        "num_heads": 2,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "initializer_range": 0.2,
        **fields,
    }


def _qwen2_vl() -> Qwen2VLConfig:
    vision = _qwen_vision(embed_dim=32, hidden_size=64, mlp_ratio=2)
    return Qwen2VLConfig(
        text_config={**_TEXT, "rope_parameters": _MROPE}, vision_config=vision, **_SPECIAL
    )


def _qwen2_5_vl() -> Qwen2_5_VLConfig:
    vision = _qwen_vision(
        hidden_size=32,
        intermediate_size=48,
        out_hidden_size=64,
        window_size=16,
        fullatt_block_indexes=[1],
        tokens_per_second=2,
    )
    return Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": _MROPE}, vision_config=vision, **_SPECIAL
    )


def _qwen3_vl() -> Qwen3VLConfig:
    vision = _qwen_vision(
        hidden_size=32,
        intermediate_size=48,
        out_hidden_size=64,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0, 1],
    )
    text = {**_TEXT, "head_dim": 16, "rope_parameters": {**_MROPE, "mrope_interleaved": True}}
    return Qwen3VLConfig(text_config=text, vision_config=vision, **_SPECIAL)


KINDS = {
    "llava-llama": Kind(lambda: _llava(LlamaConfig), 1, False),
    "llava-qwen2": Kind(lambda: _llava(Qwen2Config), 26, False),
    "llava-mistral": Kind(lambda: _llava(MistralConfig, sliding_window=17), 12, False),
    "gemma3": Kind(_gemma3, 9, False),
    "qwen2_vl": Kind(_qwen2_vl, 27, True),
    "qwen2_5_vl": Kind(_qwen2_5_vl, 13, True),
    "qwen3_vl": Kind(_qwen3_vl, 11, True),
}


def tiny_multimodal(
    name: str, device: torch.device | str = "cpu", seed: int | None = None
) -> PreTrainedModel:
    """Build the tiny float32 eager-attention model of a row of KINDS; all its weights matter."""
    kind = KINDS[name]
    seed = kind.seed if seed is None else seed
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(kind.config(), attn_implementation="eager")
    model = model.float().eval()
    noise = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Gemma 3's projection of images begins as zeros.
            if parameter.dim() == 1 or not parameter.any():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=noise))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(device)


class Picture(NamedTuple):
    """One image or video: patches in time, height and width, and a seed of its pixels."""

    grid: tuple[int, int, int] = (1, 4, 4)
    seed: int = 0
    video: bool = False


def _pixels(picture: Picture, grids: bool) -> Tensor:
    generator = torch.Generator().manual_seed(500 + picture.seed)
    if grids:
        time, height, width = picture.grid
        return torch.randn((time * height * width, 3 * 2 * 4 * 4), generator=generator)
    return torch.randn((1, 3, 12, 12), generator=generator)


def inputs_for(
    name: str, rows: Sequence[Sequence[int | Picture]], device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Return what a processor would: a left-padded batch of text (its length) and pictures."""
    kind = KINDS[name]
    ids = [_row_ids(kind, row, number) for number, row in enumerate(rows)]
    padded, mask = left_pad(ids)
    pictures = [part for row in rows for part in row if isinstance(part, Picture)]
    inputs = {"input_ids": padded, "attention_mask": mask}
    kinds = (padded == IMAGE).long()
    for video, pixels, grid in (
        (False, "pixel_values", "image_grid_thw"),
        (True, "pixel_values_videos", "video_grid_thw"),
    ):
        some = [picture for picture in pictures if picture.video == video]
        if some:
            inputs[pixels] = torch.cat([_pixels(picture, kind.grids) for picture in some])
        if some and kind.grids:
            inputs[grid] = torch.tensor([picture.grid for picture in some])
    if kind.grids:
        inputs["mm_token_type_ids"] = kinds + 2 * (padded == VIDEO).long()
    elif name == "gemma3":
        inputs["token_type_ids"] = kinds
    return {key: value.to(device) for key, value in inputs.items()}


def _row_ids(kind: Kind, row: Sequence[int | Picture], number: int) -> Tensor:
    parts = []
    for place, part in enumerate(row):
        if isinstance(part, int):
            parts.append(prompt(part, 100 * number + place + 7, IMAGE))
            continue
        time, height, width = part.grid
        count = time * height * width // 4 if kind.grids else 9
        token = VIDEO if part.video else IMAGE
        parts.append(torch.tensor([[START, *[token] * count, END]]))
    return torch.cat(parts, 1)


__all__ = ["IMAGE", "KINDS", "VIDEO", "Picture", "inputs_for", "tiny_multimodal"]
