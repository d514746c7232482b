"""GLM-5: DeepSeek-V3.2 with other sizes, some of whose layers see the tokens that the layer before them sees."""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.deepseek_v3 import latent_config
from raycore.models.deepseek_v32 import DEEPSEEK_V32, selecting_parts
from raycore.models.family import Family
from raycore.models.spec import Parts

_DEFAULTS = {
    **DEEPSEEK_V32.defaults,
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
}
_LETTERS = {"F": "full", "S": "shared"}


def shared_layers(config: JsonFields) -> list[bool]:
    """Return for each layer whether it sees the tokens that the layer before it sees, instead of selecting some.

    `indexer_types` says it, or `index_topk_pattern`. Without both, one of `index_topk_freq` layers selects some, after
    `index_skip_topk_offset` first ones, all of which do.
    """
    num_layers = config.int_("num_hidden_layers")
    key = "index_topk_pattern" if config.get("indexer_types") is None else "indexer_types"
    given = config.get(key)
    if given is None:
        freq, offset = config.int_("index_topk_freq"), config.int_("index_skip_topk_offset", low=0)
        if offset == 0 and freq > 1:
            raise config.error("index_skip_topk_offset", "at least 1: the first layer selects tokens")
        return [max(layer - offset + 1, 0) % freq != 0 for layer in range(num_layers)]
    types: list[Any] = [*given] if isinstance(given, str | list) else []
    types = [_LETTERS.get(str(each), each) for each in types]
    if len(types) != num_layers or set(types) - {"full", "shared"} or types[0] == "shared":
        raise config.error(key, f"full or shared for each of {num_layers} layers (num_hidden_layers), the first full")
    return [each == "shared" for each in types]


def _parts(config: JsonFields) -> Parts:
    return selecting_parts(config, is_adjacent=True, shared=shared_layers(config))


GLM_MOE_DSA = Family(_DEFAULTS, _parts, latent_config)
