"""A decoder's sizes and the parts that it is made of. Does not import torch."""

from __future__ import annotations

__all__ = [
    "BlockSum",
    "CheckpointDType",
    "ClampedSwiglu",
    "Gate",
    "GateFunction",
    "GateName",
    "LayerGates",
    "LayerNorms",
    "LayerSums",
    "LimitedSilu",
    "LinearShape",
    "ModelSpec",
    "NormName",
    "Parts",
    "QueryScale",
    "Roots",
    "TensorNames",
]

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec

from raycore.errors import InvalidConfig
from raycore.models.closing import ClosingSpec, LayerInputsSpec
from raycore.models.encoder_spec import EncoderSpec
from raycore.models.feed_forward import FeedForwardSpec, feed_forwards_of
from raycore.models.layer_part import LayerPart, Refusable
from raycore.models.mixers.attention import AttentionHeads, LayerHeads
from raycore.models.mixers.block_selecting import BlockIndexer
from raycore.models.mixers.kinds import StateSpec, attention_by_layer, attentions_of, kinds_of, mixers_of
from raycore.models.mixers.latent import LatentHeads
from raycore.models.mixers.selecting import Indexer
from raycore.models.mixers.spec import MixerSpec
from raycore.models.quantization import Quantization
from raycore.models.rotation import Rotation
from raycore.models.rows import Rows, divided, whole
from raycore.models.streams import StreamsSpec
from raycore.parts.drafts.models import MtpNames
from raycore.parts.experts.models import ClosingMoeSpec, MoeSpec
from raycore.parts.images.models import VisionSpec
from raycore.parts.pooling.models.pooling import PoolingSpec

CheckpointDType = Literal["float32", "bfloat16", "float16"]


class ClampedSwiglu(msgspec.Struct, frozen=True, tag=True):
    """The gate `g · sigmoid(alpha · g) · (up + 1)`. Before, g is at most `limit`, and up from `-limit` to `limit`."""

    alpha: float
    limit: float

    def __str__(self) -> str:
        return "clamped SwiGLU"


class LimitedSilu(msgspec.Struct, frozen=True, tag=True):
    """The gate `min(silu(g), limit) · up`, with up from `-limit` to `limit`. Plain torch computes it."""

    limit: float

    def __str__(self) -> str:
        return "SiLU with a limit"


class GateFunction(msgspec.Struct, frozen=True, tag=True):
    """A gate that a plugin computes in plain torch.

    It is a path, because only workers import torch: `package.module.function`. The function gets the gate and up, both
    [T, F], which it may overwrite, and returns [T, F]. A row of the result depends only on the same row of both. F is
    the part of the intermediate size that the tensor-parallel rank has.
    """

    path: str

    def __str__(self) -> str:
        return self.path


GateName = Literal["silu", "gelu", "gelu_tanh", "relu2"]
"""The activation of the gate, with which up is multiplied. `relu2` is the square of what is above 0."""
Gate = GateName | ClampedSwiglu | LimitedSilu | GateFunction
"""What gated layers compute of their two halves."""


class LayerGates(NamedTuple):
    """The gates of a layer."""

    experts: Gate
    dense: Gate
    """That of the dense feed-forward part, or of shared experts."""


NormName = Literal["rms", "layer", "biased_layer", "bare_layer"]
"""Which norm hidden states get: an RMS norm, or a layer norm with a weight alone, with a bias, too, or with neither."""
_NORM_TENSORS = {"biased_layer": ["weight", "bias"], "bare_layer": []}
"""What tensors norms have, but those that have a weight alone."""


class Roots(msgspec.Struct, frozen=True):
    """How the names of a checkpoint's tensors begin."""

    model: str = "model."
    """Before the embedding, the layers and the last norm."""
    head: str = "lm_head"
    """The head's whole name."""


class TensorNames(msgspec.Struct, frozen=True):
    """What a checkpoint calls those tensors that families name differently. None: a layer has no such tensor.

    Norms are *before* a block, which gets the normalized hidden states, or *after* it: then its result is normalized
    before it is added to the hidden states.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    other_after_attention: str | None = None
    """What checkpoints may have instead of `after_attention`. `fit_model` brings that in line with the files."""
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None
    qkv: str | None = None
    """One tensor with the rows of the query, then the key, then the value projection. None: each has its own."""
    gate_up: str | None = None
    """One tensor with the rows of the gate, then those of up. None: each has its own."""
    down: str = "mlp.down_proj"
    """The output projection of dense layers."""
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    """Reads the outputs of the query heads."""
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    """Those of `own_heads` may have `{}` in place of a head's number: then each head has a tensor of its own."""
    attention_gate: str = "self_attn.gate_proj"
    sinks: str = "self_attn.sinks"
    """A tensor with one number for each query head."""
    last_norm: str = "norm"
    """The norm after the last layer."""
    embed: str = "embed_tokens"
    layer_list: str = "layers"
    roots: Roots = Roots()
    other_roots: list[Roots] = []
    """What checkpoints may have instead of `roots`. `fit_model` brings `roots` in line with the files."""
    images: str | None = None
    """A regular expression of the tensors that only images need. If `vision` is None, they aren't used. None: there are
    none."""

    @property
    def embedding(self) -> str:
        return f"{self.roots.model}{self.embed}.weight"

    @property
    def final_norm(self) -> str:
        """The name of the norm, without that of a tensor."""
        return f"{self.roots.model}{self.last_norm}"

    @property
    def head(self) -> str:
        return f"{self.roots.head}.weight"

    @property
    def head_bias(self) -> str:
        return f"{self.roots.head}.bias"

    @property
    def layers(self) -> str:
        """How the names of all layers' tensors begin."""
        return f"{self.roots.model}{self.layer_list}."

    def layer(self, index: int) -> str:
        """How the names of a layer's tensors begin. `index`: in the model."""
        return f"{self.layers}{index}."


class LayerNorms(NamedTuple):
    """The names of a layer's norms within it. None: it has no such norm. See `TensorNames`."""

    before_attention: str | None
    after_attention: str | None
    before_feed_forward: str | None
    after_feed_forward: str | None

    @property
    def given(self) -> list[str]:
        """Those that there are, each once."""
        return [name for name in dict.fromkeys(self) if name is not None]


class BlockSum(NamedTuple):
    """By what numbers are multiplied before they are added up after a block: its input, and its result."""

    kept: float
    added: float


class LayerSums(NamedTuple):
    """How the results of a layer's blocks are added to what the blocks have read, the normalized hidden states."""

    mixer: BlockSum
    feed_forward: BlockSum


class LinearShape(msgspec.Struct, frozen=True):
    """The sizes of a linear layer."""

    num_outputs: int
    num_inputs: int
    divided: Literal["outputs", "inputs"] | None = None
    """Which of both tensor-parallel ranks divide. None: each rank has the whole layer."""

    def rows(self, tp_rank: int, tp_size: int) -> tuple[Rows, Rows]:
        """Return a rank's outputs and inputs."""
        sizes = {"outputs": self.num_outputs, "inputs": self.num_inputs}
        outputs, inputs = (
            divided("", size, tp_rank, tp_size) if self.divided == side else whole("", size)
            for side, size in sizes.items()
        )
        return outputs, inputs


class QueryScale(msgspec.Struct, frozen=True):
    """The query at position p is multiplied by `1 + growth·ln(1 + floor((p + shift) / period))`.

    Source: the temperature of attention in Llama 4.
    """

    growth: float
    period: int
    """In tokens."""
    shift: int = 0
    with_rotation: bool = True
    """Whether queries of layers that rotate are multiplied, too."""


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What families differ in. The defaults are Llama's."""

    layer_windows: list[int | None]
    """Each layer's sliding window: how many tokens a token sees, itself included. None: no window."""
    windows_are_chunks: bool = False
    """Whether windows don't slide: a sequence is divided into chunks of so many tokens, which see no other chunk."""
    rotations: list[Rotation | None]
    """How each layer rotates queries and keys. None: it doesn't."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qkv_by_group: bool = False
    """Whether the tensor `TensorNames.qkv` has the rows of one key-value head after the other instead: those of its
    query heads, of its key and of its value."""
    qk_norm: Literal["heads", "width", "own_heads", "unit"] | None = None
    """Which norm queries and keys get before the rotation: an RMS norm of each head, or one over all heads together, or
    a layer norm of each head with weights of its own, or an RMS norm of each head without weights in layers that rotate
    (`unit`)."""
    is_rotated_first: bool = False
    """Whether heads get their norms, `heads` or `unit` ones, after the rotation instead. Plain torch rotates them
    then."""
    norms_values: bool = False
    """Whether value heads get an RMS norm without weights. Then heads have norms (`heads`) before the rotation, and
    layers may read the keys and values of others: see `LayerHeads.source`."""
    layer_heads: list[LayerHeads] = []
    """What each layer's attention has of its own. Empty: all layers have the same heads."""
    value_dim: int | None = None
    """Number of elements of a value head, at most as many as a key head has. None: as many."""
    value_scale: float = 1.0
    """Values are multiplied by it."""
    latent: LatentHeads | None = None
    """The sizes of latent attention, in which `qkv_bias` is that of the first projections. None: heads are ordinary."""
    indexer: Indexer | BlockIndexer | None = None
    """What selects the tokens that latent attention sees, or the blocks of tokens that other attention sees. None: all
    are seen up to a token's own."""
    query_scale: QueryScale | None = None
    """How queries grow with their position. None: they don't. Plain torch multiplies them."""
    norm: NormName = "rms"
    norm_offset: float = 0.0
    """What is added to the weights of norms, in float32. Of layer norms: in the model's data type."""
    is_parallel: bool = False
    """Whether a layer's feed-forward part gets the hidden states before the result of attention is added. Its norm may
    be that of attention, with the same name."""
    gate: Gate = "silu"
    layer_gates: list[LayerGates] = []
    """The gates of each layer. Empty: all are `gate`."""
    is_gated: bool = True
    """Whether the feed-forward part of dense layers has a gate. Otherwise it is `down(activation(up(x)))`, with the
    activation that `gate` names."""
    dense: Literal["plain", "scaled", "xielu"] = "plain"
    """The kind of dense feed-forward parts. With `xielu`, this activation is in the place of `gate`, without a gate."""
    closings: list[ClosingSpec | StreamsSpec] = []
    """By layer: its feed-forward part, which ends the layer. Empty: there are no such parts."""
    layer_inputs: LayerInputsSpec | None = None
    """What makes the inputs of their own that layers have. None: they have none."""
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)
    """What the gate of parts of the kind `scaled`, before its activation, and their results are multiplied by."""
    encoder: EncoderSpec | None = None
    """What an encoder has instead of a decoder's parts. None: it is a decoder."""
    attention_scale: float | None = None
    """Scores are multiplied by it. None: by 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Then a score s becomes cap·tanh(s / cap). None: it doesn't."""
    sinks: bool = False
    """Whether each query head has a learned logit that takes part in the softmax and adds nothing."""
    attention_gate: Literal["query_rows", "elements", "heads"] | None = None
    """By which gate the result of attention is multiplied. The query projection has the rows of each head's gate after
    those of the head (`query_rows`), or a projection of its own has a number for each element of the result
    (`elements`), or for each head (`heads`). None: by none."""
    attention_gate_by: Literal["sigmoid", "softplus"] = "sigmoid"
    """What that gate becomes first. The softplus is computed in float32, by plain torch."""
    state_norms: LayerNorms | None = None
    """The names of the norms of layers that keep a state. None: they are those of `names`."""
    state: StateSpec | None = None
    """The layers that keep a state instead of keys and values. None: all layers have attention."""
    embedding_multiplier: float = 1.0
    rounds_embedding_multiplier: bool = False
    """Whether the multiplier is rounded to the dtype of the hidden states, as in transformers' code of Gemma."""
    scales_given_embeddings: bool = False
    """Whether embeddings that a request brings are multiplied, too, as in transformers' code of the architecture."""
    residual_multiplier: float = 1.0
    """The results of attention and of the feed-forward part are multiplied by it before they are added."""
    sums: list[LayerSums] = []
    """By layer: how the results of blocks are added to their own normalized inputs, which become the hidden states.
    Empty: they are added to hidden states as they are before a norm."""
    head_bias: bool = False
    """Whether the head has a bias."""
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None
    """Then a logit x becomes cap·tanh(x / cap). None: it doesn't."""
    parts_alone: list[Literal["mixer", "feed_forward"] | None] = []
    """By layer: the part that it has alone, without the other one and the norms around that. None: it has both. Empty:
    all layers have both."""
    moe: MoeSpec | ClosingMoeSpec | None = None
    """The experts of the sparse layers; None for a dense model. `intermediate_size` is that of dense layers."""
    num_predictors: int = 0
    """How many layers after the last one predict further tokens. Checkpoints have them, and `mtp` says whether one can
    draft."""
    mtp: MtpNames | None = None
    """The tensors of the first of these layers, with which the model can draft. None: it can't."""
    names: TensorNames = TensorNames()


class ModelSpec(Parts, frozen=True, kw_only=True, dict=True):
    """A decoder's sizes and parts, as its checkpoint describes them. Sizes are those of the whole model."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    """What norms add to the mean square, or layer norms to the variance."""
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: CheckpointDType
    """Type in which the weights are stored."""
    bos_token_id: int | None
    eos_token_ids: list[int]
    """The end-of-sequence tokens of generation_config.json, or of config.json if there are none. `config.resolve` adds
    the tokenizer's."""
    generation_defaults: dict[str, Any]
    """The sampling parameters in generation_config.json that vLLM reads, too, under the names in that file."""
    decoder: str | None = None
    """The decoder's class, as `package.module.Class`. None: raycore's own."""
    implementation: Literal["raycore", "transformers"] = "raycore"
    """Whose code computes the layers. With transformers', most parts have their defaults here."""
    tensor_parallel_sizes: list[int] | None = None
    """The numbers of ranks that can divide the model, if transformers' code computes it. None: they follow from sizes.
    """
    linears: dict[str, LinearShape] = {}
    """The linear layers that adapters may change, by name, if transformers' code computes the model."""
    vision: VisionSpec | None = None
    """The encoder of images. None: prompts are texts."""
    quantization: Quantization | None = None
    """Which weights are stored quantized, and how. `dtype` is that of the other tensors. None: no weights are."""
    pooling: PoolingSpec | None = None
    """How a model that pools makes its results. None: the model generates."""
    encodes_only: bool = False
    """Whether there is only the encoder of images: no layers, and neither embedding nor head."""
    fitted_to: str | None = None
    """The tensors with which this description was compared, as `stored_model` names them. None: with none yet."""

    @property
    def why_weights_stay(self) -> str | None:
        """Why the weights can't be replaced in a running engine. None: they can."""
        if self.implementation == "transformers":
            return (
                f"weights of {self.architecture} can't be replaced in a running engine: transformers' code computes it"
            )
        if self.encoder is not None or self.pooling is not None:
            return f"weights of {self.architecture}, which pools, can't be replaced in a running engine"
        if self.encodes_only:
            return "weights of an engine that only encodes images can't be replaced while it runs"
        return None

    @property
    def stores_fp8(self) -> bool:
        """Whether weights of linear layers are stored in fp8, with scales."""
        return self.quantization is not None and "fp8" in self.quantization.formats

    def gates(self, layer: int) -> LayerGates:
        """Return the gates of a layer."""
        return self.layer_gates[layer] if self.layer_gates else LayerGates(self.gate, self.gate)

    @property
    def has_head(self) -> bool:
        """Whether the model generates with a head of its own, which isn't the embedding."""
        return self.pooling is None and not self.tie_word_embeddings and not self.encodes_only

    @property
    def has_head_bias(self) -> bool:
        """Whether the model generates with a head that has a bias."""
        return self.head_bias and self.pooling is None and not self.encodes_only

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a sequence.

        An encoder may have fewer than `max_position_embeddings`. With YaRN scaling, this may be more than
        `max_position_embeddings`, which is often the length before scaling.
        """
        if self.encoder is not None and self.encoder.num_positions:
            return self.encoder.num_positions - self.encoder.first_position
        scalings = [rotation.scaling for rotation in self.rotations if rotation is not None]
        stretched = [
            int(scaling.factor * scaling.original_max_position_embeddings)
            for scaling in scalings
            if scaling is not None and scaling.rope_type == "yarn"
        ]
        return max([self.max_position_embeddings, *stretched])

    @cached_property
    def attention_by_layer(self) -> Sequence[AttentionHeads | LatentHeads]:
        """The attention of each layer, or that which a layer of another kind would have. There is one at least."""
        return attention_by_layer(self)

    @cached_property
    def attentions(self) -> list[AttentionHeads | LatentHeads]:
        """The attention of some layer, each one once. Several where layers have different heads."""
        return attentions_of(self)

    def norms(self, layer: int) -> LayerNorms:
        """Return the names of a layer's norms."""
        names, mixer = self.names, self.mixers[layer]
        norms = LayerNorms(
            *(names.before_attention, names.after_attention, names.before_feed_forward, names.after_feed_forward)
        )
        if self.state_norms is not None and mixer.keeps_state:
            norms = self.state_norms
        if mixer.is_null:
            norms = norms._replace(before_attention=None, after_attention=None)
        if self.feed_forwards[layer].is_null:
            norms = norms._replace(before_feed_forward=None, after_feed_forward=None)
        return norms

    def norm_tensors(self, norm: str) -> list[str]:
        """Return the names of the tensors, [hidden_size], of a norm of hidden states. `norm`: its name."""
        return [f"{norm}.{tensor}" for tensor in _NORM_TENSORS.get(self.norm, ["weight"])]

    @cached_property
    def mixers(self) -> list[MixerSpec]:
        """By layer: what mixes the tokens of a sequence."""
        return mixers_of(self)

    @cached_property
    def mixer_kinds(self) -> list[MixerSpec]:
        """What mixes tokens in some layer, each one once."""
        return kinds_of(self)

    @cached_property
    def feed_forwards(self) -> list[FeedForwardSpec]:
        """By layer: its feed-forward part."""
        return feed_forwards_of(self)

    @cached_property
    def feed_forward_kinds(self) -> list[FeedForwardSpec]:
        """What is the feed-forward part of some layer, each one once, the dense one first."""
        return sorted({id(each): each for each in self.feed_forwards}.values(), key=lambda each: each.has_experts)

    @property
    def part_kinds(self) -> list[LayerPart]:
        """What is a part of some layer, or makes inputs of layers, each one once."""
        of_inputs = [] if self.layer_inputs is None else [self.layer_inputs]
        return [*self.feed_forward_kinds, *self.mixer_kinds, *of_inputs]

    @property
    def keeps_states(self) -> bool:
        """Whether some layers keep a state of each sequence."""
        return any(kind.keeps_state for kind in self.mixer_kinds)

    @property
    def has_experts(self) -> bool:
        """Whether some layers have experts."""
        return any(kind.has_experts for kind in self.feed_forward_kinds)

    def why_not(self, asked: Refusable) -> str | None:
        """Why the model's layers exclude what is asked, as `has layers that ...`. None: they don't."""
        return next((why for kind in self.part_kinds if (why := kind.why_not(asked)) is not None), None)

    def kv_heads_per_rank(self, tp_size: int) -> int:
        """Number of key-value heads on each of `tp_size` ranks. With fewer heads than ranks, ranks share heads."""
        return max(1, self.num_kv_heads // tp_size)

    def check_tensor_parallel(self, tp_size: int, expert_parallel: bool = False) -> None:
        """Raise InvalidConfig if `tp_size` tensor-parallel ranks can't split the model. The error lists possible sizes.

        The vocabulary may have any size, because it is padded. With `expert_parallel`, the size of an expert doesn't
        matter, because experts aren't split.
        """
        if self.tensor_parallel_sizes is not None:
            self._check_planned(tp_size, self.tensor_parallel_sizes)
            return
        sizes = self._split_sizes(expert_parallel)
        for name, size in sizes:
            if size % tp_size:
                raise InvalidConfig(
                    f"tensor_parallel_size={tp_size} doesn't divide the model's {name}={size}: "
                    f"choose one of {self._tensor_parallel_sizes(sizes)}"
                )
        for kind in self.mixer_kinds:
            for name, size in kind.shared_sizes(self).items():
                if not _can_share(size, tp_size):
                    raise InvalidConfig(
                        f"tensor_parallel_size={tp_size} neither divides the model's {name}={size} nor is a multiple "
                        f"of it: choose one of {self._tensor_parallel_sizes(sizes)}"
                    )

    def _check_planned(self, tp_size: int, possible: list[int]) -> None:
        if tp_size not in possible:
            why = (
                "transformers has no plan for dividing this model that raycore knows"
                if possible == [1]
                else f"choose one of {possible}"
            )
            raise InvalidConfig(
                f"tensor_parallel_size={tp_size} can't divide {self.architecture}, which transformers' code computes: "
                f"{why}"
            )

    def _split_sizes(self, expert_parallel: bool) -> list[tuple[str, int]]:
        """Return the sizes that tensor-parallel ranks split, with their names in config.json."""
        attends = any(each in self.mixer_kinds for each in self.attentions)
        sizes = [("num_attention_heads", self.num_heads)] if attends else []
        for kind in self.mixer_kinds:
            sizes += kind.split_sizes.items()
        for kind in self.feed_forward_kinds:
            sizes += kind.split_sizes(self, expert_parallel=expert_parallel).items()
        return sizes

    def _tensor_parallel_sizes(self, sizes: list[tuple[str, int]]) -> list[int]:
        divisor = math.gcd(*(size for _, size in sizes))
        shared = [each for kind in self.mixer_kinds for each in kind.shared_sizes(self).values()]
        return [
            size
            for size in range(1, divisor + 1)
            if divisor % size == 0 and all(_can_share(each, size) for each in shared)
        ]


def _can_share(num_parts: int, num_ranks: int) -> bool:
    """Whether ranks can have equally many of the parts each, or each part equally many of the ranks."""
    return num_parts % num_ranks == 0 or num_ranks % num_parts == 0
