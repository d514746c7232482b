"""A mixture of experts as a checkpoint's config.json describes it, and how ranks divide the experts."""

from __future__ import annotations

__all__ = [
    "MXFP4_NUMBERS",
    "MXFP4_SCALES",
    "ClosingMoeSpec",
    "ExpertChoice",
    "ExpertNames",
    "ExpertShare",
    "MoeSpec",
    "SharedExperts",
    "StackedNames",
    "as_stacked",
    "check_groups",
    "experts_of",
    "grouped_sigmoid_router",
    "num_chosen",
    "num_experts",
    "sparse_after",
    "sparse_by_type",
    "sparse_layers",
]

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from raycore.json_fields import JsonFields
from raycore.models.closing import ClosingSpec, closing_bytes, closing_linears, closing_vectors
from raycore.models.feed_forward import FeedForwardSpec, HasTensor
from raycore.models.layer_part import ROWS, PartTensor, Refusable
from raycore.models.linears import FusedLinear
from raycore.models.quantization import MXFP4_GROUP
from raycore.models.rows import divided, stored_together, whole

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec  # it may have experts

MXFP4_NUMBERS, MXFP4_SCALES = "_blocks", "_scales"
"""What the names of tensors of stacked experts end with, if they are in MXFP4."""
_FLOAT32_BYTES, _INT64_BYTES = 4, 8
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class StackedNames(msgspec.Struct, frozen=True):
    """What checkpoints call the parts of a sparse layer whose experts are stacked."""

    block: str = "mlp"
    """The sparse layer itself."""
    gate_up: str = "experts.gate_up_proj"
    """The tensor that has gate and up of all experts, or up alone. That of their biases ends with `_bias`."""
    down: str = "experts.down_proj"
    up: str | None = None
    """The tensor that has up of all experts. Then `gate_up` has their gates alone. None: there is one for both."""


class ExpertNames(msgspec.Struct, frozen=True):
    """What checkpoints call the parts of a sparse layer."""

    block: str = "mlp"
    """The sparse layer itself, unless experts are stacked."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    shared: str = "shared_experts"
    """Shared experts, whose projections are `gate_proj`, `up_proj` and `down_proj`. Not read where these have names of
    their own."""
    shared_is_in_block: bool = True
    """Whether the names of shared experts begin with `block`, too."""
    shared_gate_up: str | None = None
    """Within the layer: one tensor with the rows of the shared experts' gate, then those of up."""
    shared_down: str | None = None
    """Within the layer: the output projection of shared experts."""
    shared_gate: str = "shared_expert_gate"
    into: str = "fc1_latent_proj"
    """Makes what experts read of hidden states, with `MoeSpec.inner_size`."""
    out: str = "fc2_latent_proj"
    """Makes hidden states of their sum."""
    stacked: StackedNames = StackedNames()


class ExpertShare(NamedTuple):
    """What one rank holds of a layer's experts."""

    experts: range
    """The indexes of these experts."""
    rows: range
    """Which intermediate rows of each of these experts the rank holds."""


class ExpertChoice(msgspec.Struct, frozen=True):
    """How a token's experts are chosen and weighted, from its router logits, one for each expert."""

    scores: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"
    """What logits become: probabilities of all experts (softmax), or numbers from 0 to 1 that don't depend on each
    other (sigmoid). With `softmax_of_chosen`, the logits themselves choose a token's experts, and are then made
    probabilities of these. The experts with the highest scores are chosen, and the scores are their weights."""
    is_normalized: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    has_correction: bool = False
    """Whether there is a number for each expert that is added to its scores for the choice, but not for the weights."""
    num_groups: int = 1
    """Experts are divided into so many groups of the same size."""
    num_chosen_groups: int = 1
    """A token's experts are in these groups: those whose best experts have the highest sum of scores."""
    num_compared: int = 2
    """How many of a group's best experts that sum has: 1 or 2."""
    scaling: float = 1.0
    """Weights are multiplied by it at the end."""
    has_bias: bool = False
    """Whether logits have a bias."""
    in_float32: bool = False
    """Whether logits are computed in float32, whatever the model's dtype is."""
    least_sum: float = 1e-20
    """With `is_normalized`: what is added to the sum of weights from sigmoids, which may all be 0."""

    @property
    def is_plain(self) -> bool:
        """Whether it chooses the largest of all probabilities, and no more."""
        return self.scores == "softmax" and not self.has_correction and self.num_groups == 1 and self.scaling == 1.0


class SharedExperts(msgspec.Struct, frozen=True):
    """A dense network beside the experts of a sparse layer, which gets all tokens."""

    intermediate_size: int
    has_gate: bool = False
    """Whether its result is multiplied by the sigmoid of a linear layer with one output."""
    size_key: str = "shared_expert_intermediate_size"
    """How `intermediate_size` follows from config.json."""


class MoeSpec(FeedForwardSpec, frozen=True, tag=True):
    """A decoder's sparse layers, where a router sends each token to a few of many small networks, the experts."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    """Intermediate size of one expert."""
    sparse_layers: list[bool]
    """For each layer, whether it has experts. Layers without experts are dense."""
    router: ExpertChoice = ExpertChoice()
    shared: SharedExperts | None = None
    """None: there are none."""
    names: ExpertNames = ExpertNames()
    size_key: str = "moe_intermediate_size"
    """The key of `intermediate_size` in config.json."""
    has_bias: bool = False
    """Whether the experts' projections have biases. Those of shared experts have none."""
    correction_shape: tuple[int, ...] = (ROWS,)
    """That of the tensor of `ExpertChoice.has_correction`."""
    is_gated: bool = True
    """Whether experts have a gate, and shared ones, which are as dense layers are: see `Parts.is_gated`."""
    inner_size: int | None = None
    """Size of what experts read and return: linear layers before and after them, which every rank has whole, bring
    tokens to it and back. None: it is the hidden size."""
    multiplier: float = 1.0
    """The sum of the results of experts and of shared ones is multiplied by it."""
    weighs_inputs: bool = False
    """Whether what an expert reads is multiplied by its weight, instead of its result. Plain torch computes that."""
    is_interleaved: bool = False
    """Whether gate and up alternate in stacked experts. Otherwise, those of the gate come first."""
    is_transposed: bool = False
    """Whether stacked experts have a row for each input, in form `stacked`. Otherwise, one for each output.
    `as_stacked` brings it in line with the files."""
    form: Literal["single", "stacked", "mxfp4"] = "single"
    """How a checkpoint has experts: each has tensors of its own, or all of a layer are in one tensor, or in one of
    MXFP4's numbers and one of scales. `stored` brings it in line with the files."""

    computed_by: ClassVar[str] = "raycore.parts.experts.layers.sparse_feed_forward.SparseFeedForward"
    weights_class: ClassVar[str] = "raycore.parts.experts.weights.MoeWeights"
    described: ClassVar[str] = "has experts"
    has_experts: ClassVar[bool] = True
    refused: ClassVar[Mapping[Refusable, str]] = {"fp8": "experts aren't computed in fp8"}

    def why_not(self, asked: Refusable) -> str | None:
        if asked == "int8" and self.is_transposed:
            return "has experts with a row for each input, and integers are made of rows for outputs"
        return super().why_not(asked)

    @property
    def block(self) -> str:
        """What the names of a sparse layer's tensors begin with."""
        return f"{self.names.block if self.form == 'single' else self.names.stacked.block}."

    @property
    def gate_and_up(self) -> list[str]:
        """The names of the projections that read an expert's inputs."""
        return [self.names.gate, self.names.up] if self.is_gated else [self.names.up]

    def width(self, model: ModelSpec) -> int:
        """Return the size of what experts read and return."""
        return self.inner_size or model.hidden_size

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        """Return those around experts, and those of shared experts."""
        names, read = self.names, whole("", num_inputs or model.hidden_size)
        around: list[FusedLinear] = []
        if self.inner_size is not None:
            into = whole(self.block + names.into, self.inner_size)
            around.append(FusedLinear("into_ID", (into,), read))
            out = whole(self.block + names.out, model.hidden_size)
            around.append(FusedLinear("out_DI", (out,), into))
        if self.shared is None:
            return tuple(around)
        size = self.shared.intermediate_size
        block = self.block if names.shared_is_in_block else ""
        prefix, usual = f"{block}{names.shared}.", ExpertNames()  # whatever the projections of experts are called
        own = (divided(prefix + name, size, tp_rank, tp_size) for name in (usual.gate, usual.up))
        gate, up = stored_together(names.shared_gate_up, *own)
        down = whole(names.shared_down or prefix + usual.down, model.hidden_size)
        own_gate = FusedLinear("shared_gate_1D", (whole(self.block + names.shared_gate, 1),), read, is_plain=True)
        return (
            *around,
            FusedLinear("shared_gate_up_FD", (gate, up) if self.is_gated else (up,), read),
            FusedLinear("shared_down_DF", (down,), gate, reads_divided=True),
            *([own_gate] if self.shared.has_gate else []),
        )

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        def of_experts(
            field: str, name: str, shape: tuple[int, ...] = (ROWS,), is_float32: bool = self.router.in_float32
        ) -> PartTensor:
            return PartTensor(field, (whole(self.block + name, self.num_experts),), shape, is_float32=is_float32)

        found = [of_experts("router_ED", f"{self.names.router}.weight", (ROWS, model.hidden_size))]
        if self.router.has_bias:
            found.append(of_experts("router_bias_E", f"{self.names.router}.bias"))
        if self.router.has_correction:
            found.append(of_experts("correction_E", self.names.correction, self.correction_shape, is_float32=True))
        return tuple(found)

    def tensors(self, model: ModelSpec, num_inputs: int | None = None) -> dict[str, tuple[int, ...]]:
        found, stacked = super().tensors(model, num_inputs), self.names.stacked
        width, num, size = self.width(model), self.num_experts, self.intermediate_size
        if self.form == "single":
            shapes = dict.fromkeys(self.gate_and_up, (size, width)) | {self.names.down: (width, size)}
            for name, shape in (
                (f"{self.block}experts.{i}.{name}", shape) for i in range(num) for name, shape in shapes.items()
            ):
                found |= {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if self.has_bias else {})
            return found
        num_rows = (1 if stacked.up else len(self.gate_and_up)) * size
        shapes = dict.fromkeys(filter(None, (stacked.gate_up, stacked.up)), (num_rows, width))
        for own_name, shape in (shapes | {stacked.down: (width, size)}).items():
            name = self.block + own_name
            if self.form == "mxfp4":
                groups = num, shape[0], shape[1] // MXFP4_GROUP
                found |= {name + MXFP4_NUMBERS: (*groups, MXFP4_GROUP // 2), name + MXFP4_SCALES: groups}
            else:
                found[name] = (num, *(reversed(shape) if self.is_transposed else shape))
            if self.has_bias:
                found[f"{name}_bias"] = num, shape[0]
        return found

    def stored(self, model: ModelSpec, has_tensor: HasTensor) -> MoeSpec:
        stacked = self.first_stacked(model)
        form = "mxfp4" if has_tensor(stacked + MXFP4_NUMBERS) else "stacked" if has_tensor(stacked) else "single"
        return replace(self, form=form)

    def other_forms(self, model: ModelSpec, has_tensor: HasTensor) -> list[HasTensor]:
        stacked, is_single = self.first_stacked(model), self.stored(model, has_tensor).form == "single"
        return [lambda name: is_single if name == stacked else has_tensor(name)]

    def first_stacked(self, model: ModelSpec) -> str:
        """Return the name of the tensor that has gate and up of all experts, if there is one."""
        names = self.names.stacked
        return f"{model.names.layer(self.sparse_layers.index(True))}{names.block}.{names.gate_up}"

    def num_weights(self, model: ModelSpec) -> int:
        return super().num_weights(model) + model.hidden_size * self.num_experts

    def expert_weights(self, model: ModelSpec) -> tuple[int, int]:
        one = (1 + len(self.gate_and_up)) * self.width(model) * self.intermediate_size
        return self.num_experts * one, self.num_experts_per_tok * one

    def split_sizes(self, model: ModelSpec, *, expert_parallel: bool) -> dict[str, int]:
        sizes = {} if expert_parallel else {self.size_key: self.intermediate_size}
        return sizes if self.shared is None else sizes | {self.shared.size_key: self.shared.intermediate_size}

    def token_bytes(
        self, model: ModelSpec, mixed: int, tp_size: int, item_size: int, num_engines: int, *, is_native: bool
    ) -> int:
        """Return those of a token's copies for its experts, and of the experts' results, or of the shared experts'."""
        pair = 3 * (model.hidden_size + self.intermediate_size) * item_size + 4 * _INT64_BYTES
        scores = self.num_experts * _FLOAT32_BYTES
        experts = self.num_experts_per_tok * pair + 3 * scores
        if not self.router.is_plain:
            experts = max(experts, 6 * scores)
        shared_size = 0 if self.shared is None else self.shared.intermediate_size // tp_size
        shared, results = (3 if is_native else 4) * shared_size * item_size, 4 * model.hidden_size * item_size
        return mixed + max(num_engines * experts, shared) + num_engines * results

    def split_experts(self, tp_rank: int, tp_size: int) -> ExpertShare:
        """Return a rank's share with tensor parallelism: the same number of rows of every expert."""
        return ExpertShare(range(self.num_experts), _rows_of_rank(self.intermediate_size, tp_rank, tp_size))

    def whole_experts(self, ep_rank: int, ep_size: int) -> ExpertShare:
        """Return a rank's share with expert parallelism: a range of whole experts.

        The numbers of experts of two ranks differ by at most one.
        """
        first, end = (rank * self.num_experts // ep_size for rank in (ep_rank, ep_rank + 1))
        return ExpertShare(range(first, end), range(self.intermediate_size))


class ClosingMoeSpec(MoeSpec, frozen=True, kw_only=True):
    """Experts beside a dense network, in parts that end the layers of a model, all of which have them.

    The dense network is that of shared experts. It reads hidden states after the layer's norm, experts read them after
    another norm, and the router after one without weights. Both results are normalized and added.
    """

    end: ClosingSpec

    computed_by: ClassVar[str] = "raycore.parts.experts.layers.closing_sparse.ClosingSparse"
    weights_class: ClassVar[str] = "raycore.parts.experts.layers.closing_sparse.ClosingMoeWeights"
    described: ClassVar[str] = "has experts beside a dense network"

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        return super().linears(model, tp_rank, tp_size, num_inputs) + closing_linears(self.end, model)

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        num, hidden = self.num_experts, model.hidden_size
        norms = {
            "dense_after_D": "post_feedforward_layernorm_1.weight",
            "experts_before_D": "pre_feedforward_layernorm_2.weight",
            "experts_after_D": "post_feedforward_layernorm_2.weight",
            "router_scale_D": "router.scale",
        }
        return (
            PartTensor("router_ED", (whole("router.proj.weight", num),), (ROWS, hidden)),
            PartTensor("scales_E", (whole("router.per_expert_scale", num),)),
            *(PartTensor(field, (whole(name, hidden),)) for field, name in norms.items()),
            *closing_vectors(self.end, model),
        )

    def token_bytes(
        self, model: ModelSpec, mixed: int, tp_size: int, item_size: int, num_engines: int, *, is_native: bool
    ) -> int:
        own = super().token_bytes(model, mixed, tp_size, item_size, num_engines, is_native=is_native)
        return own + (1 + num_engines) * closing_bytes(self.end, model, item_size)


def _rows_of_rank(num_rows: int, tp_rank: int, tp_size: int) -> range:
    num_own = num_rows // tp_size
    return range(tp_rank * num_own, (tp_rank + 1) * num_own)


def experts_of(model: ModelSpec) -> MoeSpec:
    """Return the sparse layers of a model that has experts."""
    assert model.moe is not None, "the model has experts"
    return model.moe


def as_stacked(model: ModelSpec, shape_of: Callable[[str], tuple[int, ...] | None]) -> ModelSpec:
    """Return a model whose stacked experts have their rows as the files do: for each output, or for each input.

    `shape_of`: returns the shape of a tensor in the files, or None.
    """
    moe = model.moe
    found = None if moe is None else shape_of(moe.first_stacked(model))
    if moe is None or found is None or len(found) != 3:
        return model
    num_rows, width = len(moe.gate_and_up) * moe.intermediate_size, moe.width(model)
    if num_rows == width or sorted(found[1:]) != sorted((num_rows, width)):
        return model
    return replace(model, moe=replace(moe, is_transposed=found[1] == width))


def num_experts(config: JsonFields) -> int:
    """Return the number of experts, which config.json has under one of several keys."""
    given = [key for key in _NUM_EXPERTS if config.values.get(key) is not None]
    return config.int_(given[0] if given else "num_experts")


def num_chosen(config: JsonFields) -> int:
    """Return the number of a token's experts."""
    chosen, available = config.int_("num_experts_per_tok"), num_experts(config)
    if chosen > available:
        raise config.error("num_experts_per_tok", f"at most the model's {available} experts")
    return chosen


def grouped_sigmoid_router(config: JsonFields) -> ExpertChoice:
    """Return the router that DeepSeek-V3 has introduced, with the numbers of groups in config.json."""
    num_groups, num_chosen_groups = check_groups(config)
    return ExpertChoice(
        "sigmoid",
        is_normalized=config.bool_("norm_topk_prob"),
        has_correction=True,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        scaling=config.float_("routed_scaling_factor"),
        in_float32=True,
    )


def check_groups(config: JsonFields) -> tuple[int, int]:
    """Return the number of groups of experts, and of how many of them a token's experts are."""
    total, num_groups, num_chosen_groups = num_experts(config), config.int_("n_group"), config.int_("topk_group")
    if total % num_groups:
        raise config.error("n_group", f"a divisor of the model's {total} experts")
    least = -(-num_chosen(config) * num_groups // total)
    if not least <= num_chosen_groups <= num_groups:
        raise config.error("topk_group", f"from {least}, which a token's experts need, to n_group={num_groups}")
    return num_groups, num_chosen_groups


def sparse_layers(config: JsonFields) -> list[bool]:
    """Return for each layer whether it has experts: every `decoder_sparse_step`-th one not in `mlp_only_layers`."""
    every = config.optional_int("decoder_sparse_step") or 1
    dense = config.list_("mlp_only_layers") or []
    return [layer not in dense and (layer + 1) % every == 0 for layer in range(config.int_("num_hidden_layers"))]


def sparse_after(config: JsonFields, key: str) -> list[bool]:
    """Return for each layer whether it has experts: all but the first ones, whose number is at `key`."""
    num_dense = config.int_(key, low=0)
    return [layer >= num_dense for layer in range(config.int_("num_hidden_layers"))]


def sparse_by_type(config: JsonFields, num_dense: int) -> list[bool]:
    """Return for each layer whether `mlp_layer_types` says that it has experts.

    `num_dense`: without types, all layers but so many first ones have experts.
    """
    types, num_layers = config.list_("mlp_layer_types"), config.int_("num_hidden_layers")
    if types is None:
        return [layer >= num_dense for layer in range(num_layers)]
    if len(types) != num_layers or any(each not in ("dense", "sparse") for each in types):
        raise config.error("mlp_layer_types", f"a list of {num_layers} entries (num_hidden_layers), dense or sparse")
    return [each == "sparse" for each in types]
