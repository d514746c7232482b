"""Small random decoders that pool, of every family and form, and what transformers and sentence-transformers make of
prompts with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from families import SIZES, VOCAB_SIZE
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import normalize

TAG = 5
"""The token whose results models with `STEP` return."""
CLASS_TOKENS = (11, 7)
"""Two tokens that are classes, the second of which is a score's."""
_RANDOM = {"initializer_range": 0.3}


@dataclass(frozen=True)
class PoolingCase:
    """A checkpoint, how an engine is started with it, and its results."""

    write: Callable[[Path], None]
    reference: Callable[[Path, list[int]], dict[str, Tensor]]
    """By task: what a prompt gives."""
    options: dict[str, Any] = field(default_factory=dict)


def checkpoint(name: str, directory: Path) -> Path:
    """Write the checkpoint of `CASES[name]`."""
    path = directory / name
    torch.manual_seed(sum(map(ord, name)))
    CASES[name].write(path)
    words = {f"t{token}": token for token in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return path


def references(name: str, path: Path, prompts: Sequence[list[int]]) -> list[dict[str, NDArray[np.float32]]]:
    """By prompt and task, the results of a checkpoint in float32."""
    with torch.inference_mode():
        found = [CASES[name].reference(path, prompt) for prompt in prompts]
    return [{task: result.numpy() for task, result in each.items()} for each in found]


def write_model(architecture: str, config: str, **changes: Any) -> Callable[[Path], None]:
    """Return what writes a model of transformers. Its norms and biases aren't those that it begins with."""

    def write(path: Path) -> None:
        settings = getattr(transformers, config)(**{**SIZES, **_RANDOM, "num_key_value_heads": 2, **changes})
        model = getattr(transformers, architecture)(settings).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += torch.randn_like(parameter) * 0.2
        model.save_pretrained(path)

    return write


def _hidden(path: Path, prompt: list[int], kind: str = "AutoModel") -> Tensor:
    """Return the final hidden states [T, D]."""
    model = _model(path, kind)
    return model(torch.tensor([prompt])).last_hidden_state[0]


def _model(path: Path, kind: str) -> Any:
    known = _MODELS.setdefault(path, {})
    if kind not in known:
        known[kind] = getattr(transformers, kind).from_pretrained(path, dtype=torch.float32).eval()
    return known[kind]


_MODELS: dict[Path, dict[str, Any]] = {}
"""The last models, by path."""


def _embeddings(pool: Callable[[Tensor], Tensor]) -> Callable[[Path, list[int]], dict[str, Tensor]]:
    def reference(path: Path, prompt: list[int]) -> dict[str, Tensor]:
        hidden = _hidden(path, prompt)
        return {"embed": normalize(pool(hidden), dim=-1), "token_embed": normalize(hidden, dim=-1)}

    return reference


def _classes(path: Path, prompt: list[int]) -> dict[str, Tensor]:
    model = _model(path, "AutoModelForSequenceClassification")
    logits = model.score(model.model(torch.tensor([prompt])).last_hidden_state[0])
    by_token = logits.softmax(-1) if logits.shape[1] > 1 else logits.sigmoid()
    own = model(torch.tensor([prompt])).logits[0]
    assert torch.allclose(own, logits[-1], atol=1e-5)
    found = {"classify": by_token[-1], "token_classify": by_token}
    return found | ({"score": by_token[-1]} if logits.shape[1] == 1 else {})


def _token_classes(path: Path, prompt: list[int]) -> dict[str, Tensor]:
    logits = _model(path, "AutoModelForTokenClassification")(torch.tensor([prompt])).logits[0]
    return {"token_classify": logits.softmax(-1)}


def _two_tokens(path: Path, prompt: list[int]) -> dict[str, Tensor]:
    logits = _model(path, "AutoModelForCausalLM")(torch.tensor([prompt])).logits[0]
    probabilities = logits[:, list(CLASS_TOKENS)].softmax(-1)
    score = probabilities[:, 1:]
    return {"classify": score[-1], "score": score[-1], "token_classify": score}


def _step_tokens(path: Path, prompt: list[int]) -> dict[str, Tensor]:
    logits = _model(path, "AutoModelForCausalLM")(torch.tensor([prompt])).logits[0]
    probabilities = logits[:, list(CLASS_TOKENS)].softmax(-1)
    return {"classify": probabilities[-1], "token_classify": probabilities[torch.tensor(prompt) == TAG]}


def _write_rewards(architecture: str, num_labels: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        write_model("Qwen2Model", "Qwen2Config")(path)
        size = SIZES["hidden_size"]
        tensors = {
            "score.0.weight": torch.randn(size, size) * 0.2,
            "score.0.bias": torch.randn(size),
            "score.2.weight": torch.randn(num_labels, size) * 0.2,
            "score.2.bias": torch.randn(num_labels),
        }
        _rewrite(path, tensors, prefix="model.")
        _change(path / "config.json", architectures=[architecture])

    return write


def _rewards(path: Path, prompt: list[int]) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    tensors = load_file(path / "model.safetensors")
    hidden = _hidden(path, prompt)
    hidden = torch.relu(hidden @ tensors["score.0.weight"].T + tensors["score.0.bias"])
    logits = hidden @ tensors["score.2.weight"].T + tensors["score.2.bias"]
    if logits.shape[1] == 1:
        return {"token_classify": logits.sigmoid()}
    return {"token_classify": logits.softmax(-1)[torch.tensor(prompt) == TAG]}


def _rewrite(path: Path, more: dict[str, Tensor], prefix: str) -> None:
    """Give the tensors of a checkpoint a prefix, and add others."""
    from safetensors.torch import load_file

    file = path / "model.safetensors"
    save_file({f"{prefix}{name}": tensor for name, tensor in load_file(file).items()} | more, file, {"format": "pt"})


def _change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def _write_sentence_model(path: Path) -> None:
    """A checkpoint as sentence-transformers writes it, with two linear layers."""
    write_model(
        "Gemma3TextModel", "Gemma3TextConfig", head_dim=16, sliding_window=17, query_pre_attn_scalar=16, pad_token_id=0
    )(path)
    size = SIZES["hidden_size"]
    kinds = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    folders = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index)]
    modules = [
        {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for index, (folder, kind) in enumerate(zip(folders, kinds, strict=True))
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    for folder in folders[1:]:
        (path / folder).mkdir()
    (path / folders[1] / "config.json").write_text(
        json.dumps({"word_embedding_dimension": size, "pooling_mode_mean_tokens": True})
    )
    for folder, outputs, inputs, activation in ((folders[2], 40, size, "Tanh"), (folders[3], 24, 40, "Identity")):
        named = "activation.Tanh" if activation == "Tanh" else "linear.Identity"
        config = {"in_features": inputs, "out_features": outputs, "bias": activation == "Tanh"}
        (path / folder / "config.json").write_text(
            json.dumps({**config, "activation_function": f"torch.nn.modules.{named}"})
        )
        tensors = {"linear.weight": torch.randn(outputs, inputs) * 0.3}
        tensors |= {"linear.bias": torch.randn(outputs)} if config["bias"] else {}
        save_file(tensors, path / folder / "model.safetensors")
    _change(path / "config.json", matryoshka_dimensions=[8, 16])


def _sentence_embeddings(path: Path, prompt: list[int]) -> dict[str, Tensor]:
    from sentence_transformers import SentenceTransformer

    known = _MODELS.setdefault(path, {})
    if "sentence" not in known:
        known["sentence"] = SentenceTransformer(str(path), device="cpu").float().eval()
    inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.int64)}
    return {"embed": known["sentence"](inputs)["sentence_embedding"][0]}


def _last(hidden: Tensor) -> Tensor:
    return hidden[-1]


_RERANKER = {"classifier_from_token": [f"t{token}" for token in CLASS_TOKENS], "is_original_qwen3_reranker": True}

CASES: dict[str, PoolingCase] = {
    "last": PoolingCase(write_model("Qwen3Model", "Qwen3Config", head_dim=32), _embeddings(_last)),
    "mean_of_a_model_that_generates": PoolingCase(
        write_model("LlamaForCausalLM", "LlamaConfig"),
        _embeddings(lambda hidden: hidden.mean(0)),
        {"runner": "pooling", "pooler_config": {"pooling_type": "MEAN"}},
    ),
    # a window that prompts outgrow
    "first": PoolingCase(
        write_model("MistralModel", "MistralConfig", sliding_window=17),
        _embeddings(lambda hidden: hidden[0]),
        {"pooler_config": {"seq_pooling_type": "CLS"}},
    ),
    "sentence_transformers": PoolingCase(_write_sentence_model, _sentence_embeddings),
    "classes": PoolingCase(
        write_model("Qwen2ForSequenceClassification", "Qwen2Config", num_labels=3, pad_token_id=0), _classes
    ),
    "score": PoolingCase(
        write_model("LlamaForSequenceClassification", "LlamaConfig", num_labels=1, pad_token_id=0), _classes
    ),
    "token_classes": PoolingCase(
        write_model("Qwen3ForTokenClassification", "Qwen3Config", head_dim=32, num_labels=4), _token_classes
    ),
    "rewards": PoolingCase(_write_rewards("Qwen2ForRewardModel", 1), _rewards),
    "rewards_of_steps": PoolingCase(
        _write_rewards("Qwen2ForProcessRewardModel", 2), _rewards, {"pooler_config": {"step_tag_id": TAG}}
    ),
    "reranker": PoolingCase(
        write_model("Qwen3ForCausalLM", "Qwen3Config", head_dim=32, tie_word_embeddings=False),
        _two_tokens,
        {"hf_overrides": {"architectures": ["Qwen3ForSequenceClassification"], **_RERANKER}},
    ),
    "tied_reranker": PoolingCase(
        write_model("Qwen3ForCausalLM", "Qwen3Config", head_dim=32, tie_word_embeddings=True),
        _two_tokens,
        {"hf_overrides": {"architectures": ["Qwen3ForSequenceClassification"], **_RERANKER}},
    ),
    "tokens_as_classes": PoolingCase(
        write_model("MistralForCausalLM", "MistralConfig", tie_word_embeddings=False),
        _step_tokens,
        {
            "runner": "pooling",
            "pooler_config": {
                "pooling_type": "STEP",
                "step_tag_id": TAG,
                "returned_token_ids": list(CLASS_TOKENS),
            },
        },
    ),
}
"""The forms, which between them have every family that raycore's users pool with."""


def prompts() -> list[list[int]]:
    """Prompts of many lengths, with the tag, two of which share a prefix of several blocks."""
    generator = np.random.default_rng(7)
    made: list[list[int]] = [generator.integers(0, VOCAB_SIZE, length).tolist() for length in (1, 5, 16, 33, 50)]
    made.append([*made[4][:40], 3, 1, 4])
    for prompt in made[1:]:
        prompt[1] = prompt[-2] = TAG
    return made
