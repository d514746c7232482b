"""Layers that keep a state of a fixed size instead of keys and values, as config.json describes them."""

from __future__ import annotations

__all__ = ["DeltaSpec", "Mamba2Spec", "StateSpec", "state_layers"]

import msgspec

from raycore.checkpoint.json_fields import JsonFields


class DeltaSpec(msgspec.Struct, frozen=True, tag=True):
    """Layers with the gated delta rule. Sizes are those of the whole model."""

    layers: list[bool]
    """For each layer, whether it is such a layer. The others have attention."""
    num_k_heads: int
    num_v_heads: int
    """A multiple of `num_k_heads`."""
    k_dim: int
    """Number of elements of a key head, and of a query head."""
    v_dim: int
    conv_size: int
    """Number of taps of the convolution, the token's own included."""
    is_interleaved: bool
    """Whether checkpoints have one tensor for queries, keys, values and the gate z, and one for b and a, with the rows
    of one key head after the other. Otherwise, queries, keys and values share a tensor, one after the other, and the
    rest have tensors of their own."""

    block = "linear_attn"
    """What checkpoints call the part of a layer."""

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: those of queries, then of keys, then of values."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    @property
    def num_values(self) -> int:
        """Number of elements of all value heads."""
        return self.num_v_heads * self.v_dim

    @property
    def split_sizes(self) -> dict[str, int]:
        """The sizes that tensor-parallel ranks split, by their names in config.json."""
        return {"linear_num_key_heads": self.num_k_heads}

    def of_rank(self, tp_size: int) -> DeltaSpec:
        """Return the sizes on one of `tp_size` ranks."""
        return msgspec.structs.replace(
            self, num_k_heads=self.num_k_heads // tp_size, num_v_heads=self.num_v_heads // tp_size
        )

    def state_numbers(self) -> int:
        """Return the number of elements of a sequence's state in one layer, without that of the convolution."""
        return self.num_v_heads * self.k_dim * self.v_dim

    def num_weights(self, hidden_size: int) -> int:
        """Return the number of multiplications for one token in the projections of a layer."""
        return hidden_size * (self.num_channels + 2 * self.num_values + 2 * self.num_v_heads)


class Mamba2Spec(msgspec.Struct, frozen=True, tag=True):
    """Layers of Mamba-2. Sizes are those of the whole model."""

    layers: list[bool]
    """For each layer, whether it is such a layer. The others have attention."""
    num_groups: int
    num_v_heads: int
    """A multiple of `num_groups`."""
    k_dim: int
    """Size of the state of each of a head's elements."""
    v_dim: int
    """Elements of a head."""
    conv_size: int
    """Number of taps of the convolution, the token's own included."""
    has_conv_bias: bool

    block = "mamba"
    """What checkpoints call the part of a layer."""

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: those of x, then of B, then of C."""
        return self.num_values + 2 * self.num_groups * self.k_dim

    @property
    def num_values(self) -> int:
        """Number of elements of all heads."""
        return self.num_v_heads * self.v_dim

    @property
    def split_sizes(self) -> dict[str, int]:
        """The sizes that tensor-parallel ranks split, by their names in config.json. All ranks have a single group."""
        return {"mamba_n_heads" if self.num_groups == 1 else "mamba_n_groups": self._num_parts}

    @property
    def _num_parts(self) -> int:
        return self.num_v_heads if self.num_groups == 1 else self.num_groups

    def of_rank(self, tp_size: int) -> Mamba2Spec:
        """Return the sizes on one of `tp_size` ranks."""
        num_groups = max(1, self.num_groups // tp_size)
        return msgspec.structs.replace(self, num_groups=num_groups, num_v_heads=self.num_v_heads // tp_size)

    def state_numbers(self) -> int:
        """Return the number of elements of a sequence's state in one layer, without that of the convolution."""
        return self.num_v_heads * self.k_dim * self.v_dim

    def num_weights(self, hidden_size: int) -> int:
        """Return the number of multiplications for one token in the projections of a layer."""
        return hidden_size * (self.num_channels + 2 * self.num_values + self.num_v_heads)


StateSpec = DeltaSpec | Mamba2Spec
"""The layers of a model that keep a state."""


def state_layers(config: JsonFields, every: int | None = None) -> list[bool]:
    """Return for each layer whether `layer_types` says `linear_attention`, not `full_attention`.

    `every`: without `layer_types`, every such layer has attention.

    Raises:
        InvalidCheckpoint: a type is another one, or no layer has attention.
    """
    num_layers, types = config.int_("num_hidden_layers"), config.list_("layer_types")
    if types is None:
        types = ["full_attention" if every and (i + 1) % every == 0 else "linear_attention" for i in range(num_layers)]
    known = ("linear_attention", "full_attention")
    if len(types) != num_layers or any(each not in known for each in types) or "full_attention" not in types:
        expected = (
            f"a list of {num_layers} entries (num_hidden_layers), each {' or '.join(known)}, one of these at least"
        )
        raise config.error("layer_types", expected)
    return [each == "linear_attention" for each in types]
