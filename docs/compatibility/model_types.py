"""What is said of transformers' types of models that raycore has no family for, where its own words aren't enough."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class OtherType(NamedTuple):
    """A type that isn't one of causal language models to transformers, although people generate text with it."""

    name: str
    """As in config.json."""
    architecture: str
    refused: str = ""
    """Why raycore doesn't compute it. Empty: it is a family of its own."""


OTHER_TYPES = (
    OtherType(
        "glm5_next", "Glm5NextForConditionalGeneration", "attention to selected tokens, and several residual streams"
    ),
    OtherType("kimi_k25", "Kimi_K25ForConditionalGeneration"),
    OtherType("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration"),
    OtherType("mistral3", "Mistral3ForConditionalGeneration"),
    OtherType("mistral4", "Mistral4ForCausalLM"),
    OtherType(
        "mistral_large4",
        "MistralLarge4ForConditionalGeneration",
        "attention to selected tokens, and layers that share keys and values",
    ),
    OtherType("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
    OtherType("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    OtherType("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
    OtherType("step3p5", "Step3p5ForCausalLM"),
    OtherType("step3p7", "Step3p7ForConditionalGeneration"),
)

NOTES: Mapping[str, str] = {
    "bailing_hybrid": "only if the gates of experts have no limits",
    "gemma3": "with images",
    "gemma3n": "the texts",
    "gemma4": "the texts",
    "gemma4_unified": "the texts",
    "kimi_k25": "the texts",
    "llama4": "the texts",
    "mistral3": "the texts",
    "nemotron_h": "without the least time (`time_step_min`) that transformers' code has for prompts alone",
    "olmo": "only without `clip_qkv`; transformers' code computes the others",
    "olmoe": "only without `clip_qkv`; transformers' code computes the others",
    "qwen2_5_vl": "with images",
    "qwen3_5": "the texts",
    "qwen3_5_moe": "the texts",
    "qwen3_vl": "with images",
    "qwen3_vl_moe": "with images",
    "step3p7": "the texts",
    "laguna": "without caps of router logits",
    "falcon": "without a bias of positions (ALiBi)",
    "falcon_mamba": "residuals are in the model's data type, whatever `residual_in_fp32` says",
    "mamba": "residuals are in the model's data type, whatever `residual_in_fp32` says",
    "mamba2": "residuals are in the model's data type, whatever `residual_in_fp32` says",
    "minimax_m2": "routers compute in float32, as if they were stored so",
    "minimax_m3_vl": "the texts; routers compute in float32, as if they were stored so",
    "minimax_m3_vl_text": "only if no layer selects tokens",
}
"""What holds for some of the models of a type."""

_ENCODER_DECODER = "half of an encoder with a decoder: there is no cache for what the encoder gives"
_PADDING = "an encoder as a decoder: positions are counted from the ids of padding"
_OLD_ENCODER = "an encoder as a decoder: attention doesn't go through transformers' interface"
_BIAS = "positions are a bias of scores, or attention doesn't go through transformers' interface"
_OTHER_STATES = "layers keep a state of a kind that raycore doesn't have"
_OTHER_INPUTS = "a decoder of another modality's tokens, or of bytes in patches"
_LOOPS = "its layers run several times over a token"
_RELATIVE = "relative positions as a bias of scores, and convolutions within attention"
_DRAFTS = "not a model, but a head that drafts"
_OWN_PARTS = "an indexer of its own, or norms and rotations that no family has"
_SELECTED = "attention to selected tokens"

REASONS: Mapping[str, tuple[str, ...]] = {
    _ENCODER_DECODER: (
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "git", "marian", "mbart", "mllama"),
        *("moss_transcribe_diarize", "musicgen", "musicgen_melody", "mvp", "pegasus", "phi4_multimodal", "plbart"),
        *("prophetnet", "trocr", "whisper"),
    ),
    _PADDING: (
        *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    ),
    _OLD_ENCODER: ("big_bird", "megatron-bert", "rembert", "roformer"),
    _BIAS: (
        *("bloom", "cpmant", "doge", "gpt_neo", "gpt_neox_japanese", "mpt", "openai-gpt", "reformer", "xglm"),
        *("xlm", "xlnet"),
    ),
    _OTHER_STATES: (*("jetmoe", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya"),),
    _OTHER_INPUTS: ("blt", "emu3", "fuyu", "got_ocr2"),
    _LOOPS: ("hrm_text", "inkling2_loop_text"),
    _RELATIVE: ("inkling2_text", "inkling_text"),
    _DRAFTS: ("gemma4_assistant", "gemma4_unified_assistant"),
    _OWN_PARTS: ("axk2", "cohere_compass_text", "dbrx", "dots3_note", "dots3_note_text", "lara_mini"),
    _SELECTED: ("deepseek_v4", "hy_v4", "qwen4_exp", "qwen4_exp_text"),
}
"""Why types are refused, by reason."""
