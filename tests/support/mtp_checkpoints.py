"""Small checkpoints that have a layer that predicts the next token but one, and what it drafts by transformers' code.

The layer is as the model's last one, with other numbers. Transformers leaves it out when it loads the model, and so
doesn't save it either.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from families import auto_class, make_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoConfig


class StoredHead(NamedTuple):
    """How a checkpoint names the tensors of such a layer, and what transformers has to know to compute it."""

    layer: str = "model.layers.{}."
    """How the names of the layer's own tensors begin; in braces: the number of the model's layers."""
    others: str = "model.layers.{}."
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    final_norm: str = "shared_head.norm"
    copies: tuple[str, ...] = ("embed_tokens", "shared_head.head")
    """Of the model's embedding and head."""
    as_model: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    """Settings of a model whose only layer is such a layer."""
    norm_offset: float = 0.0
    is_hidden_first: bool = False
    architecture: str | None = None
    """That of the checkpoint. None: the one that transformers writes."""


_QWEN = StoredHead(
    *("mtp.layers.0.", "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", ()),
    {"layer_types": ["full_attention"]},
    norm_offset=1.0,
)
MTP_FAMILIES: dict[str, StoredHead] = {
    "deepseek_v3": StoredHead(as_model={"first_k_dense_replace": 0}),
    "glm4_moe": StoredHead(as_model={"first_k_dense_replace": 0}),
    "glm4_moe_lite": StoredHead(as_model={"mlp_layer_types": ["sparse"]}),
    # MiMo is Qwen2 with such a layer
    "qwen2": StoredHead(
        *("model.mtp_layers.0.", "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj"),
        *("final_layernorm", ()),
        {"layer_types": ["full_attention"]},
        is_hidden_first=True,
        architecture="MiMoForCausalLM",
    ),
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_next": _QWEN._replace(as_model={"layer_types": ["full_attention"], "mlp_only_layers": []}),
}
"""By the toy that the checkpoint is made of."""


class MtpCheckpoint:
    """A checkpoint with such a layer, and a reference that drafts with it."""

    def __init__(self, family: str, directory: Path) -> None:
        """`directory`: where the checkpoint is made."""
        torch.set_num_threads(1)
        self.path = make_checkpoint(family, directory)
        self._stored = stored = MTP_FAMILIES[family]
        config = AutoConfig.from_pretrained(self.path)
        self._eps = config.rms_norm_eps
        tensors = {name: each for file in self.path.glob("*.safetensors") for name, each in load_file(file).items()}
        last = f"model.layers.{config.num_hidden_layers - 1}."
        own = {name.removeprefix(last): each.flip(-1) for name, each in tensors.items() if name.startswith(last)}
        self._others = self._make_others(config.hidden_size)
        self._target = self._load(self.path)
        self._head = self._load(self._write_head(directory, config, tensors, own))
        layer, others = (each.format(config.num_hidden_layers) for each in (stored.layer, stored.others))
        tensors |= {f"{layer}{name}": each for name, each in own.items()}
        tensors |= {f"{others}{name}.weight": each for name, each in self._others.items()}
        for name, of_model in zip(stored.copies, ("model.embed_tokens", "lm_head"), strict=False):
            tensors[f"{others}{name}.weight"] = tensors[f"{of_model}.weight"].clone()
        for file in [*self.path.glob("*.safetensors"), *self.path.glob("*.index.json")]:
            file.unlink()
        _save(self.path, tensors)
        if stored.architecture is not None:
            fields = json.loads((self.path / "config.json").read_text())
            fields |= {"architectures": [stored.architecture], "model_type": "mimo", "num_nextn_predict_layers": 1}
            (self.path / "config.json").write_text(json.dumps(fields))

    @torch.inference_mode()
    def drafts(self, known: list[int], num: int) -> list[int]:
        """Return what follows the tokens `known`, by the layer, which gets its own results after the first token."""
        stored, found = self._stored, list[int]()
        hidden_TD = self._target.model(torch.tensor([known[:-1]])).last_hidden_state[0]
        for _ in range(num):
            following = torch.tensor([*known[1:], *found])
            embedded_TD = self._norm(self._target.get_input_embeddings()(following), stored.embedding_norm)
            halves = [embedded_TD, self._norm(hidden_TD, stored.hidden_norm)]
            x_TD = torch.cat(halves[::-1] if stored.is_hidden_first else halves, 1) @ self._others[stored.projection].T
            last_D = self._head.model(inputs_embeds=x_TD[None]).last_hidden_state[0, -1]
            found.append(int(self._target.lm_head(last_D).argmax()))
            hidden_TD = torch.cat([hidden_TD, last_D[None]])
        return found

    def _norm(self, x_TD: torch.Tensor, name: str) -> torch.Tensor:
        normed_TD = x_TD / (x_TD.square().mean(-1, keepdim=True) + self._eps).sqrt()
        return normed_TD * (self._others[name] + self._stored.norm_offset)

    def _make_others(self, size: int) -> dict[str, torch.Tensor]:
        """The tensors that the model's layers don't have."""
        stored = self._stored
        norms = (stored.embedding_norm, stored.hidden_norm, stored.final_norm)
        made = {name: 1 - stored.norm_offset + 0.3 * torch.randn(size) for name in norms}
        return made | {stored.projection: torch.randn(size, 2 * size) * 0.2}

    def _write_head(
        self, directory: Path, config: Any, tensors: dict[str, torch.Tensor], own: dict[str, torch.Tensor]
    ) -> Path:
        """Write a model whose only layer is this one."""
        path = directory / "head"
        path.mkdir()
        (path / "config.json").write_text(
            json.dumps(config.to_dict() | {"num_hidden_layers": 1} | self._stored.as_model)
        )
        alone = {name: each for name, each in tensors.items() if not name.startswith("model.layers.")}
        alone |= {f"model.layers.0.{name}": each for name, each in own.items()}
        _save(path, alone | {"model.norm.weight": self._others[self._stored.final_norm]})
        return path

    def _load(self, path: Path) -> Any:
        made_by = auto_class(AutoConfig.from_pretrained(path))
        return made_by.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: each.contiguous() for name, each in tensors.items()}, path / "model.safetensors", {"format": "pt"})
