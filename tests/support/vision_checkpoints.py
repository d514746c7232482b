"""Small random checkpoints that see images, as AutoProcessor and transformers' models read them."""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image as PILImage
from PIL.Image import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as NativeTokenizer

from raycore.checkpoint.model_spec import load_model_spec
from raycore.messages import Feature, FeatureData
from raycore.parts.images.client.processor import processor_class

QWEN2_5, QWEN3, GEMMA3 = "qwen2_5_vl", "qwen3_vl", "gemma3"
QWEN3_MOE = "qwen3_vl_moe"
"""With the encoder of `QWEN3`."""
KINDS = (QWEN2_5, QWEN3, GEMMA3)
"""With each encoder of images."""
MODELS = (*KINDS, QWEN3_MOE)
IMAGE = "[image]"
"""In texts of prompts."""
_CORPUS = [
    "What is in this image? And in that one? Describe the colours, please.",
    "user assistant system model turn",
] * 5
_QWEN_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
_GEMMA_TOKENS = (
    *("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
)
_PIXELS = {QWEN2_5: 28, QWEN3: 32, QWEN3_MOE: 32, GEMMA3: 0}
"""Rows and columns of pixels of one embedding, for images of any size."""
_QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_GEMMA_TEMPLATE = (
    "<bos>{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}<start_of_image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def make_vision_checkpoint(kind: str, directory: Path, seed: int = 0, **text_sizes: Any) -> Path:
    """Write a checkpoint of one of `MODELS` in float32: weights, tokenizer, processor and chat template.

    `seed`: of the weights, which also depend on the version of transformers. `text_sizes`: replace some sizes of the
    model of texts.
    """
    path = directory / kind
    tokenizer = _tokenizer(kind)
    config = _config(kind, tokenizer, text_sizes)
    torch.manual_seed(sum(map(ord, kind)) + seed)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        # transformers starts biases at 0 and norms at 1, which would hide one that isn't applied
        if name.endswith("bias") or "norm" in name or ".ln_q" in name:
            parameter.data += torch.randn_like(parameter) * 0.2
        elif "mm_input_projection" in name or "position_embedding" in name or "pos_embed" in name:
            parameter.data = torch.randn_like(parameter) * 0.5
        elif not parameter.any():  # such as a router, which would choose the same experts for all tokens
            parameter.data += torch.randn_like(parameter) * 0.3
    model.save_pretrained(path)
    _save_processors(kind, tokenizer, path)
    return path


def _tokenizer(kind: str) -> Any:
    native = NativeTokenizer(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    special = _GEMMA_TOKENS if kind == GEMMA3 else _QWEN_TOKENS
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=[AddedToken(each, special=True, normalized=False) for each in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    native.train_from_iterator(_CORPUS, trainer)
    if kind == GEMMA3:
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=native,
            pad_token="<pad>",
            eos_token="<eos>",
            bos_token="<bos>",
            unk_token="<unk>",
            extra_special_tokens={
                "image_token": "<image_soft_token>",
                "boi_token": "<start_of_image>",
                "eoi_token": "<end_of_image>",
            },
            model_max_length=4096,
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=native,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        model_max_length=4096,
    )


def _config(kind: str, tokenizer: Any, sizes: dict[str, Any]) -> Any:
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        # wide, so that the top two logits of a random model are rarely close
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    token = tokenizer.convert_tokens_to_ids
    if kind == GEMMA3:
        text |= {
            "head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 11,
            "query_pre_attn_scalar": 20,
            "initializer_range": 0.1,
            "bos_token_id": tokenizer.bos_token_id,
        }
        vision: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 7,
            "vision_use_head": False,
        }
        return transformers.Gemma3Config(
            text_config=text | sizes,
            vision_config=vision,
            mm_tokens_per_image=16,
            boi_token_index=token("<start_of_image>"),
            eoi_token_index=token("<end_of_image>"),
            image_token_index=token("<image_soft_token>"),
            eos_token_id=tokenizer.eos_token_id,
        )
    vision = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "initializer_range": 0.2,
    }
    tokens = {
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
    }
    if kind == QWEN2_5:
        text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
        vision |= {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1, 3]}
        return transformers.Qwen2_5_VLConfig(text_config=text | sizes, vision_config=vision, **tokens)
    text |= {
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    vision |= {"patch_size": 16, "num_position_embeddings": 36, "deepstack_visual_indexes": [1, 2]}
    if kind == QWEN3:
        return transformers.Qwen3VLConfig(text_config=text | sizes, vision_config=vision, **tokens)
    text |= {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "mlp_only_layers": [1]}
    return transformers.Qwen3VLMoeConfig(text_config=text | sizes, vision_config=vision, **tokens)


def _save_processors(kind: str, tokenizer: Any, path: Path) -> None:
    """Write the tokenizer, the image processor's preprocessor_config.json and the chat template.

    Those of videos, which need torchvision, aren't written. So AutoProcessor reads Gemma 3's alone.
    """
    if kind == GEMMA3:
        images = processor_class("siglip")(size={"height": 56, "width": 56}, image_seq_length=16)
        processor = transformers.Gemma3Processor(images, tokenizer, chat_template=_GEMMA_TEMPLATE, image_seq_length=16)
        processor.save_pretrained(path)
        return
    pixels, name = _PIXELS[kind], "Qwen2_5_VLProcessor" if kind == QWEN2_5 else "Qwen3VLProcessor"
    images = processor_class("qwen2_5_vl")(
        patch_size=pixels // 2,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 4 * pixels**2, "longest_edge": 64 * pixels**2},
    )
    images.save_pretrained(path)
    written = path / "preprocessor_config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | {"processor_class": name}, indent=2))
    tokenizer.chat_template = _QWEN_TEMPLATE
    tokenizer.save_pretrained(path)


@dataclass
class Prompt:
    """A prompt with images, as transformers' processors make it."""

    token_ids: list[int]
    features: list[Feature]
    data: list[FeatureData]
    reference: dict[str, Any]
    """What transformers' `generate` gets."""

    @property
    def pixels(self) -> list[torch.Tensor]:
        """The values from which each image's embeddings are computed."""
        return [torch.frombuffer(bytearray(each.data), dtype=torch.float32).view(each.shape) for each in self.data]


class Prompts:
    """Makes prompts for the checkpoint at `path`. A text has `IMAGE` where an image is."""

    def __init__(self, path: Path) -> None:
        self._spec = load_model_spec(path).vision
        assert self._spec is not None
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self._processor = processor_class(self._spec.kind).from_pretrained(path)
        self._is_gemma = self._spec.kind == "siglip"

    def make(self, text: str, images: list[Image]) -> Prompt:
        """Return the prompt with these images."""
        token_ids: list[int] = []
        features: list[Feature] = []
        data: list[FeatureData] = []
        parts, spec = text.split(IMAGE), self._spec
        assert len(parts) == len(images) + 1
        for part, image in zip(parts, [*images, None], strict=True):
            token_ids += self._tokenizer.encode(part, add_special_tokens=False)
            if image is None:
                continue
            values = self._processor(images=[image], return_tensors="pt")
            pixels = values["pixel_values"]
            grid = (1, 4, 4) if self._is_gemma else tuple(values["image_grid_thw"][0].tolist())
            pixels = pixels[0] if self._is_gemma else pixels
            num_tokens = spec.num_tokens(grid)
            features.append(Feature(_hash(pixels), len(token_ids) + 1, num_tokens, grid))
            data.append(FeatureData(pixels.numpy().tobytes(), list(pixels.shape)))
            token_ids += [spec.start_token_id, *[spec.image_token_id] * num_tokens, spec.end_token_id]
        return Prompt(token_ids, features, data, self._reference(token_ids, features, data))

    def _reference(self, token_ids: list[int], features: list[Feature], data: list[FeatureData]) -> dict[str, Any]:
        ids = torch.tensor([token_ids])
        types = (ids == self._spec.image_token_id).long()
        made = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        made["token_type_ids" if self._is_gemma else "mm_token_type_ids"] = types
        if data:
            pixels = [torch.frombuffer(bytearray(each.data), dtype=torch.float32).view(each.shape) for each in data]
            made["pixel_values"] = torch.stack(pixels) if self._is_gemma else torch.cat(pixels)
        if data and not self._is_gemma:
            made["image_grid_thw"] = torch.tensor([each.grid for each in features])
        return made


def _hash(pixels: torch.Tensor) -> str:
    return hashlib.blake2b(pixels.numpy().tobytes(), digest_size=16).hexdigest()


def image(width: int, height: int, seed: int = 0) -> Image:
    """Return an image whose colours vary smoothly, and differ by seed."""
    rng = np.random.default_rng(seed)
    coarse = PILImage.fromarray(rng.integers(0, 256, (6, 5, 3), dtype=np.uint8))
    return coarse.resize((width, height), PILImage.Resampling.BICUBIC)


def embeddings_of(model: Any, values: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    """Return an image's embeddings by a model of transformers, with those of deepstack in further columns."""
    if model.config.model_type == GEMMA3:
        return model.model.get_image_features(values[None]).pooler_output[0]
    found = model.model.get_image_features(values, torch.tensor([grid]))
    deep = getattr(found, "deepstack_features", None) or []
    # each is a tuple, by image; deepstack's are tensors in earlier versions
    return torch.cat([each[0] if isinstance(each, tuple | list) else each for each in [found.pooler_output, *deep]], 1)


def greedy(path: Path, prompts: list[Prompt], num_tokens: int) -> list[list[int]]:
    """Return what transformers generates from each prompt alone, in float32."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    outputs: list[list[int]] = []
    for prompt in prompts:
        taken = inspect.signature(model.forward).parameters  # versions of transformers before 5.4 want fewer
        given = {name: value for name, value in prompt.reference.items() if name in taken}
        made = model.generate(**given, max_new_tokens=num_tokens, do_sample=False)
        outputs.append(made[0, len(prompt.token_ids) :].tolist())
    return outputs
