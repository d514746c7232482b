"""BERT: an encoder with learned positions and token types, whose norms come after the sums."""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.encoder_spec import EncoderNames, EncoderSpec
from raycore.models.family import Family, gate
from raycore.models.spec import Parts, Roots, TensorNames

BERT_DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    # no tensor of the model depends on these
    "rms_norm_eps": 1e-12,
    "tie_word_embeddings": True,
}
_LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
    "embed": "embeddings.word_embeddings",
    "layer_list": "encoder.layer",
}
_UNUSED = {
    r"(.*\.)?embeddings\.position_ids": "follow from config.json",
    r"(cls|lm_head|classifier)\..*": "heads that this form of the model hasn't",
    r"(.*\.)?pooler\..*": "only classifiers use the pooler",
}


def bert_parts(config: JsonFields, root: str = "bert.", first_position: int = 0) -> Parts:
    """Return the parts of BERT.

    Args:
        root: how the names of tensors begin where a head is above the encoder.
        first_position: the learned position of a prompt's first token.

    Raises:
        InvalidCheckpoint: a setting has a value that raycore would compute wrongly.
    """
    kind = config.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise config.error("position_embedding_type", "absolute")
    for key in ("is_decoder", "add_cross_attention"):
        if config.bool_(key):
            raise config.error(key, "false: this is an encoder")
    num_layers = config.int_("num_hidden_layers")
    return Parts(
        layer_windows=[None] * num_layers,
        rotations=[None] * num_layers,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gate=gate(config),
        is_gated=False,
        names=TensorNames(
            before_attention=None,
            before_feed_forward=None,
            roots=Roots(root),
            other_roots=[Roots("")],
            **_LAYER,
        ),
        encoder=EncoderSpec(
            norm_eps=config.float_("layer_norm_eps"),
            num_positions=config.int_("max_position_embeddings"),
            first_position=first_position,
            num_token_types=config.int_("type_vocab_size"),
            reaches=[None] * num_layers,
            names=EncoderNames(),
            unused=_UNUSED,
        ),
    )


def roberta_parts(config: JsonFields) -> Parts:
    """Return the parts of RoBERTa: BERT with positions that begin after that of padding."""
    return bert_parts(config, "roberta.", config.int_("pad_token_id", low=0) + 1)


_ROBERTA_DEFAULTS: dict[str, Any] = {**BERT_DEFAULTS, "vocab_size": 50265, "pad_token_id": 1}

BERT = Family(BERT_DEFAULTS, bert_parts, decoder="raycore.encoder.encoder.Encoder")
ROBERTA = Family(_ROBERTA_DEFAULTS, roberta_parts, decoder="raycore.encoder.encoder.Encoder")
XLM_ROBERTA = Family({**_ROBERTA_DEFAULTS, "vocab_size": 30522}, roberta_parts, decoder=ROBERTA.decoder)
