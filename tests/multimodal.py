"""Tiny random models that read images, and prompts with images of several sizes for them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from models import BASE, Built, left_pad, prompt
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3TextConfig,
    Idefics3Config,
    InternVLConfig,
    InternVLVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SiglipVisionConfig,
    SmolVLMConfig,
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
    """A kind of model: how its config is made, a weight seed without near ties, its images.

    Attributes:
        images: in "grids" of patches of any size, as "sizes" of padded images, "tiled", in "rows"
            of as many for each prompt, or all of one "shape".
        side: of a square image.
        count: tokens of an image; 0: a quarter of its patches.
    """

    config: Any
    seed: int
    images: str = "shape"
    side: int = 12
    count: int = 9

    @property
    def grids(self) -> bool:
        """Whether tokens of an image have positions of three components."""
        return self.images == "grids"


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


def _qwen3_vl_moe() -> Qwen3VLMoeConfig:
    dense = _qwen3_vl()
    text = {
        **_TEXT,
        "head_dim": 16,
        "rope_parameters": {**_MROPE, "mrope_interleaved": True},
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [1],
    }
    vision = dense.vision_config.to_dict()
    vision.pop("model_type")
    return Qwen3VLMoeConfig(text_config=text, vision_config=vision, **_SPECIAL)


def _internvl() -> InternVLConfig:
    vision = InternVLVisionConfig(
        **_VISION,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=[16, 16],
        patch_size=[4, 4],
    )
    return InternVLConfig(
        vision_config=vision,
        text_config=Qwen2Config(**_TEXT),
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )


def _llava_next() -> LlavaNextConfig:
    plain = _llava(LlamaConfig)
    return LlavaNextConfig(
        vision_config=plain.vision_config,
        text_config=plain.text_config,
        image_token_index=IMAGE,
        image_grid_pinpoints=[[12, 24]],
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )


def _mistral3() -> Mistral3Config:
    vision = PixtralVisionConfig(
        **_VISION, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=4
    )
    return Mistral3Config(
        vision_config=vision,
        text_config=MistralConfig(**_TEXT, sliding_window=None),
        image_token_index=IMAGE,
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )


def _idefics3(config: type[Idefics3Config]) -> Idefics3Config:
    sizes = {**_VISION, "num_hidden_layers": 2, "num_attention_heads": 2}
    return config(
        vision_config={**sizes, "image_size": 16, "patch_size": 4},
        text_config=LlamaConfig(**_TEXT),
        image_token_id=IMAGE,
        scale_factor=2,
        tie_word_embeddings=False,
    )


KINDS = {
    "llava-llama": Kind(lambda: _llava(LlamaConfig), 1),
    "llava-qwen2": Kind(lambda: _llava(Qwen2Config), 26),
    "llava-mistral": Kind(lambda: _llava(MistralConfig, sliding_window=17), 12),
    "gemma3": Kind(_gemma3, 9),
    "qwen2_vl": Kind(_qwen2_vl, 27, "grids", count=0),
    "qwen2_5_vl": Kind(_qwen2_5_vl, 13, "grids", count=0),
    "qwen3_vl": Kind(_qwen3_vl, 11, "grids", count=0),
    "qwen3_vl_moe": Kind(_qwen3_vl_moe, 0, "grids", count=0),
    "internvl": Kind(_internvl, 14, side=16, count=4),
    # A small copy of the image, and both of its halves with the end of each line.
    "llava_next": Kind(_llava_next, 19, "tiled", count=9 + 3 * (6 + 1)),
    "mistral3": Kind(_mistral3, 21, "sizes", count=0),
    "idefics3": Kind(lambda: _idefics3(Idefics3Config), 13, "rows", side=16, count=4),
    "smolvlm": Kind(lambda: _idefics3(SmolVLMConfig), 13, "rows", side=16, count=4),
}


def tiny_multimodal(
    name: str, device: torch.device | str = "cpu", seed: int | None = None
) -> PreTrainedModel:
    """Return the tiny float32 eager-attention model of a row of KINDS; all its weights matter."""
    seed = KINDS[name].seed if seed is None else seed
    torch.manual_seed(seed)
    model, generator = _build(name, seed)
    torch.set_rng_state(generator)
    return copy.deepcopy(model).to(device)


@functools.cache
def _build(name: str, seed: int) -> Built:
    config = KINDS[name].config()
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    noise = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Gemma 3's projection of images begins as zeros.
            if parameter.dim() == 1 or not parameter.any():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=noise))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return Built(model, torch.get_rng_state())


class Picture(NamedTuple):
    """One image or video: patches in time, height and width, and a seed of its pixels."""

    grid: tuple[int, int, int] = (1, 4, 4)
    seed: int = 0
    video: bool = False


def _pixels(kind: Kind, picture: Picture) -> Tensor:
    generator = torch.Generator().manual_seed(500 + picture.seed)
    time, height, width = picture.grid
    shape: tuple[int, ...] = (1, 3, kind.side, kind.side)
    if kind.images == "grids":
        shape = (time * height * width, 3 * 2 * 4 * 4)
    elif kind.images == "sizes":
        shape = (1, 3, 4 * height, 4 * width)
    elif kind.images == "tiled":
        shape = (1, 3, 3, kind.side, kind.side)
    return torch.randn(shape, generator=generator)


def _batch_of(kind: Kind, rows: Sequence[Sequence[Picture]]) -> Tensor:
    """Return the pixels of all images, those of a row together."""
    images = [[_pixels(kind, picture) for picture in row] for row in rows]
    if kind.images == "rows":
        # Images of zeros stand for those that a row has not.
        shape = (len(rows), max(map(len, rows)), *images[0][0].shape[1:])
        batch = torch.zeros(shape)
        for values, row in zip(batch, images, strict=True):
            for value, image in zip(values, row, strict=False):
                value.copy_(image[0])
        return batch
    flat = [image for row in images for image in row]
    if kind.images == "sizes":
        height, width = (max(image.shape[dim] for image in flat) for dim in (2, 3))
        flat = [pad(i, (0, width - i.shape[3], 0, height - i.shape[2])) for i in flat]
    return torch.cat(flat)


def inputs_for(
    name: str, rows: Sequence[Sequence[int | Picture]], device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Return what a processor would: a left-padded batch of text (its length) and pictures."""
    kind = KINDS[name]
    ids = [_row_ids(kind, row, number) for number, row in enumerate(rows)]
    padded, mask = left_pad(ids)
    pictures = [[part for part in row if isinstance(part, Picture)] for row in rows]
    inputs = {"input_ids": padded, "attention_mask": mask}
    kinds = (padded == IMAGE).long()
    for video, pixels, grid in (
        (False, "pixel_values", "image_grid_thw"),
        (True, "pixel_values_videos", "video_grid_thw"),
    ):
        some = [[picture for picture in row if picture.video == video] for row in pictures]
        grids = torch.tensor([picture.grid for row in some for picture in row])
        if len(grids):
            inputs[pixels] = _batch_of(kind, some)
        if len(grids) and kind.grids:
            inputs[grid] = grids
        elif len(grids) and kind.images == "sizes":
            inputs["image_sizes"] = 4 * grids[:, 1:]
        elif len(grids) and kind.images == "tiled":
            inputs["image_sizes"] = torch.tensor([[kind.side, 2 * kind.side]] * len(grids))
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
        count = kind.count or time * height * width // 4
        token = VIDEO if part.video else IMAGE
        parts.append(torch.tensor([[START, *[token] * count, END]]))
    return torch.cat(parts, 1)


__all__ = ["IMAGE", "KINDS", "VIDEO", "Picture", "inputs_for", "tiny_multimodal"]
