"""ModernBERT: an encoder with rotations, norms before its blocks, and gates. In two of three layers, a token sees only
those near it."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.encoder_spec import EncoderNames, EncoderSpec
from raycore.models.family import Family, gate, sliding_layers
from raycore.models.rotation import Rotation, parse_rotation
from raycore.models.spec import Parts, Roots, TensorNames

_DEFAULTS = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "hidden_activation": "gelu",
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "classifier_pooling": "cls",
    "classifier_activation": "gelu",
    # no tensor of the model depends on these
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_NAMES = TensorNames(
    before_attention=None,
    before_feed_forward=None,
    qkv="attn.Wqkv",
    o="attn.Wo",
    gate_up="mlp.Wi",
    down="mlp.Wo",
    embed="embeddings.tok_embeddings",
    roots=Roots("model."),
    other_roots=[Roots("")],
)
_ENCODER_NAMES = EncoderNames(
    embedding_norm="embeddings.norm",
    attention_norm="attn_norm",
    feed_forward_norm="mlp_norm",
    final_norm="final_norm",
)


def _parts(config: JsonFields) -> Parts:
    has_bias, is_local = config.bool_("attention_bias"), _local_layers(config)
    full, local = (_rotation(config, kind) for kind in ("global", "local"))
    # a window of `local_attention` tokens has half of them on each side
    reach = config.int_("local_attention") // 2
    return Parts(
        layer_windows=[None] * len(is_local),
        rotations=[local if each else full for each in is_local],
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=config.bool_("mlp_bias"),
        gate=gate(config, "hidden_activation"),
        names=_NAMES,
        encoder=EncoderSpec(
            norm_eps=config.float_("norm_eps"),
            has_norm_bias=config.bool_("norm_bias"),
            is_norm_first=True,
            reaches=[reach if each else None for each in is_local],
            names=_ENCODER_NAMES,
            unused={r"(head|decoder|classifier)\..*": "heads that this form of the model hasn't"},
        ),
    )


def _local_layers(config: JsonFields) -> list[bool]:
    """Return for each layer whether its tokens see only those near them."""
    given, every = sliding_layers(config), config.int_("global_attn_every_n_layers")
    return [layer % every != 0 for layer in range(config.int_("num_hidden_layers"))] if given is None else given


def _rotation(config: JsonFields, kind: str) -> Rotation:
    """Return the rotation of layers of a kind, in the form of transformers 5 or as configurations had it before."""
    key = {"global": "full_attention", "local": "sliding_attention"}[kind]
    if config.get("rope_parameters") is None:
        return Rotation(config.float_(f"{kind}_rope_theta"))
    own = config.child("rope_parameters").child(key)
    defaults = {"rope_theta": config.get(f"{kind}_rope_theta")}
    return parse_rotation(config.converted(lambda values: {**values, "rope_parameters": {**defaults, **own.values}}))


MODERNBERT = Family(_DEFAULTS, _parts, decoder="raycore.encoder.encoder.Encoder")
