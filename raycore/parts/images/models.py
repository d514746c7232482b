"""The encoders of images in checkpoints that have one beside the model of texts. Does not import torch.

An encoder divides an image into *patches*, and makes embeddings of them, which take the places of tokens in the prompt.
An image's *grid* says how many patches it has along each axis: frames, rows and columns.
"""

from __future__ import annotations

__all__ = ["VisionSpec", "gemma3_vision", "qwen2_5_vision", "qwen3_vision", "without_text", "without_vision"]

from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from raycore.json_fields import JsonFields
from raycore.models.activations import read_activation

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec

Grid = tuple[int, int, int]
_QWEN_DEFAULTS = {
    "in_channels": 3,
    "num_heads": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN2_5_DEFAULTS = {
    **_QWEN_DEFAULTS,
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "patch_size": 14,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN3_DEFAULTS = {
    **_QWEN_DEFAULTS,
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "patch_size": 16,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_SIGLIP_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
Activation = Literal["silu", "gelu", "gelu_tanh"]


class VisionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder of images: its sizes, and how its embeddings take part in the model of texts."""

    kind: Literal["qwen2_5_vl", "qwen3_vl", "siglip"]
    """How the encoder computes. SigLIP's is followed by Gemma 3's projector."""
    image_token_id: int
    """The token in a prompt that stands for one embedding of an image."""
    start_token_id: int
    """The token before an image."""
    end_token_id: int
    """The token after an image."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    activation: Activation
    norm_eps: float = 1e-6
    out_size: int
    """Elements of an embedding, which are as many as those of the hidden states of the model of texts."""
    num_channels: int = 3
    patch_size: int
    """Rows and columns of pixels in a patch."""
    temporal_patch_size: int = 1
    """Frames in a patch. An image is repeated so often."""
    merge_size: int = 1
    """Rows and columns of the grid that become one embedding."""
    image_size: int | None = None
    """Rows and columns of pixels that each image has after it was resized. Then its grid counts embeddings, not
    patches. None: images have different sizes."""
    tokens_per_image: int | None = None
    """The number of embeddings of each image. None: it follows from the grid."""
    window_size: int | None = None
    """In layers with windows: rows and columns of embeddings whose patches see each other. None: no layer has one."""
    full_layers: list[int] = []
    """The layers without windows."""
    num_positions: int = 0
    """Learned embeddings of positions, which are those of a square. 0: there are none."""
    theta: float | None = None
    """The base of the frequencies of the rotation of rows and columns. None: nothing is rotated."""
    deepstack_layers: list[int] = []
    """The layers whose outputs become further embeddings. The n-th of these is added to the output of the n-th layer of
    the model of texts."""
    is_bidirectional: bool = False
    """Whether an image's tokens see each other in the model of texts, those after them, too. Then all of them are
    computed in the same step."""
    prefix: str
    """How the names of the encoder's tensors begin."""
    other_prefixes: list[str] = []
    """What checkpoints may have instead. `fit_model` brings `prefix` in line with the files."""
    projector: str = ""
    """The same for the tensors of the projector, if there is one."""
    other_projectors: list[str] = []
    unused: str | None = None
    """A regular expression of those tensors, without their prefix, that embeddings don't depend on. None: there are
    none."""

    @property
    def patch_values(self) -> int:
        """Number of values of a patch."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def embedding_width(self) -> int:
        """Elements of everything that an encoder returns for one token: an embedding, then those of deepstack."""
        return self.out_size * (1 + len(self.deepstack_layers))

    @property
    def patches_per_token(self) -> int:
        """How many patches become one embedding."""
        if self.image_size is None or self.tokens_per_image is None:
            return self.merge_size**2
        return (self.image_size // self.patch_size) ** 2 // self.tokens_per_image

    def num_tokens(self, grid: Grid) -> int:
        """Return how many embeddings, and so tokens of the prompt, an image with this grid has."""
        frames, rows, columns = grid
        return frames * (rows // self.merge_size) * (columns // self.merge_size)

    def num_positions_of(self, grid: Grid) -> int:
        """Return by how much the position of three axes grows from an image's first token to the token after it."""
        return max(grid[1], grid[2]) // self.merge_size

    def input_shape(self, grid: Grid) -> tuple[int, ...]:
        """Return the shape of the values from which an image's embeddings are computed."""
        if self.image_size is not None:
            return self.num_channels, self.image_size, self.image_size
        return grid[0] * grid[1] * grid[2], self.patch_values

    def check_grid(self, grid: Grid) -> str | None:
        """Return why no image has this grid. None: one may have it."""
        if min(grid) < 1 or grid[1] % self.merge_size or grid[2] % self.merge_size:
            return f"rows and columns have to be multiples of {self.merge_size}, and at least one of each"
        if self.tokens_per_image is not None and self.num_tokens(grid) != self.tokens_per_image:
            return f"every image has {self.tokens_per_image} embeddings"
        return None


def without_vision(spec: ModelSpec) -> ModelSpec:
    """Return the description of the model of texts alone, whose tokens have one position each."""
    rotations = [None if each is None else msgspec.structs.replace(each, sections=()) for each in spec.rotations]
    is_alone = spec.vision is None and rotations == spec.rotations
    return spec if is_alone else msgspec.structs.replace(spec, vision=None, rotations=rotations)


def without_text(spec: ModelSpec) -> ModelSpec:
    """Return the description of the encoder of images alone. One without an encoder stays as it is."""
    if spec.vision is None:
        return spec
    return msgspec.structs.replace(
        spec,
        encodes_only=True,
        decoder="raycore.parts.images.vision.alone.NoLayers",
        num_layers=0,
        layer_windows=[],
        rotations=[],
        layer_heads=[],
        max_position_embeddings=spec.max_length,
        latent=None,
        state=None,
        moe=None,
    )


def qwen2_5_vision(config: JsonFields) -> VisionSpec:
    """Return the encoder of Qwen2.5-VL, whose layers attend to windows."""
    vision = config.child("vision_config").with_defaults(_QWEN2_5_DEFAULTS)
    merge, patch = vision.int_("spatial_merge_size"), vision.int_("patch_size")
    window = vision.int_("window_size") // merge // patch
    if window < 1:
        raise vision.error("window_size", f"at least {merge * patch}, the pixels of one embedding")
    return _qwen_vision(
        config,
        vision,
        "qwen2_5_vl",
        window_size=window,
        full_layers=_layers(vision, "fullatt_block_indexes"),
    )


def qwen3_vision(config: JsonFields) -> VisionSpec:
    """Return the encoder of Qwen3-VL, some of whose layers return embeddings, too."""
    vision = config.child("vision_config").with_defaults(_QWEN3_DEFAULTS)
    num_positions = vision.int_("num_position_embeddings")
    if int(num_positions**0.5) ** 2 != num_positions:
        raise vision.error("num_position_embeddings", "the number of positions of a square")
    layers = _layers(vision, "deepstack_visual_indexes")
    if len(layers) >= config.child("text_config").with_defaults({"num_hidden_layers": 32}).int_("num_hidden_layers"):
        raise vision.error("deepstack_visual_indexes", "fewer layers than the model of texts has")
    return _qwen_vision(config, vision, "qwen3_vl", num_positions=num_positions, deepstack_layers=layers)


def gemma3_vision(config: JsonFields) -> VisionSpec:
    """Return the encoder of Gemma 3: SigLIP, whose patches are averaged and projected."""
    vision = config.child("vision_config").with_defaults(_SIGLIP_DEFAULTS)
    config = config.with_defaults(
        {
            "image_token_index": 262144,
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "mm_tokens_per_image": 256,
        }
    )
    if vision.get("model_type") not in (None, "siglip_vision_model"):
        raise vision.error("model_type", "siglip_vision_model")
    size, patch = vision.int_("image_size"), vision.int_("patch_size")
    num_tokens, patches = config.int_("mm_tokens_per_image"), size // patch
    side = int(num_tokens**0.5)
    if side**2 != num_tokens or patches % side:
        raise config.error("mm_tokens_per_image", f"the square of a divisor of {patches}, an image's rows of patches")
    return VisionSpec(
        kind="siglip",
        image_token_id=config.int_("image_token_index", low=0),
        start_token_id=config.int_("boi_token_index", low=0),
        end_token_id=config.int_("eoi_token_index", low=0),
        num_layers=vision.int_("num_hidden_layers"),
        hidden_size=_divided(vision, "num_attention_heads"),
        intermediate_size=vision.int_("intermediate_size"),
        num_heads=vision.int_("num_attention_heads"),
        activation=read_activation(vision, "hidden_act", get_args(Activation)),
        norm_eps=vision.float_("layer_norm_eps"),
        out_size=config.child("text_config").with_defaults({"hidden_size": 2304}).int_("hidden_size"),
        num_channels=vision.int_("num_channels"),
        patch_size=patch,
        image_size=size,
        tokens_per_image=num_tokens,
        num_positions=patches**2,
        is_bidirectional=True,
        prefix="vision_tower.vision_model.",
        other_prefixes=["model.vision_tower.vision_model.", "model.vision_tower.", "vision_tower."],
        projector="multi_modal_projector.",
        other_projectors=["model.multi_modal_projector."],
        unused=r"head\..*|embeddings\.position_ids",
    )


def _qwen_vision(
    config: JsonFields,
    vision: JsonFields,
    kind: Literal["qwen2_5_vl", "qwen3_vl"],
    *,
    window_size: int | None = None,
    full_layers: list[int] | None = None,
    num_positions: int = 0,
    deepstack_layers: list[int] | None = None,
) -> VisionSpec:
    tokens = config.with_defaults(
        {"image_token_id": 151655, "vision_start_token_id": 151652, "vision_end_token_id": 151653}
    )
    head_dim = _divided(vision, "num_heads") // vision.int_("num_heads")
    if head_dim % 4:
        raise vision.error("num_heads", f"heads with a multiple of 4 elements, which are rotated, not {head_dim}")
    text = config if config.get("text_config") is None else config.child("text_config")
    out_size, text_size = vision.int_("out_hidden_size"), text.optional_int("hidden_size")
    if text_size is not None and out_size != text_size:
        raise vision.error("out_hidden_size", f"{text_size}, the hidden size of the model of texts")
    return VisionSpec(
        kind=kind,
        image_token_id=tokens.int_("image_token_id", low=0),
        start_token_id=tokens.int_("vision_start_token_id", low=0),
        end_token_id=tokens.int_("vision_end_token_id", low=0),
        num_layers=vision.int_("depth"),
        hidden_size=vision.int_("hidden_size"),
        intermediate_size=vision.int_("intermediate_size"),
        num_heads=vision.int_("num_heads"),
        activation=read_activation(vision, "hidden_act", get_args(Activation)),
        out_size=out_size,
        num_channels=vision.int_("in_channels"),
        patch_size=vision.int_("patch_size"),
        temporal_patch_size=vision.int_("temporal_patch_size"),
        merge_size=vision.int_("spatial_merge_size"),
        window_size=window_size,
        full_layers=full_layers or [],
        num_positions=num_positions,
        theta=vision.child("rope_parameters").with_defaults({"rope_theta": 10000.0}).float_("rope_theta"),
        deepstack_layers=deepstack_layers or [],
        prefix="model.visual.",
        other_prefixes=["visual."],
    )


def _divided(vision: JsonFields, heads_key: str) -> int:
    """Return the hidden size, which the heads divide."""
    size, num_heads = vision.int_("hidden_size"), vision.int_(heads_key)
    if size % num_heads:
        raise vision.error("hidden_size", f"a multiple of {heads_key}={num_heads}")
    return size


def _layers(vision: JsonFields, key: str) -> list[int]:
    found, num_layers = vision.list_(key) or [], vision.int_("depth")
    if not all(type(each) is int and 0 <= each < num_layers for each in found):
        raise vision.error(key, f"a list of layers from 0 to {num_layers - 1}")
    return found
