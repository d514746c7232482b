"""Small checkpoints that have layers that predict further tokens, and what these draft by transformers' code.

Such a layer is as one of the model's, with other numbers. Transformers leaves it out when it loads the model, and so
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
    """How a checkpoint names the tensors of such layers, and what transformers has to know to compute one."""

    layer: str = "model.layers.{}."
    """How the names of a layer's own tensors begin; in braces: its number. So do those of the model's layers, which
    come first then."""
    others: str = "model.layers.{}."
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    final_norm: str | None = "shared_head.norm"
    """None: it is the model's."""
    copies: tuple[str, ...] = ("embed_tokens", "shared_head.head")
    """Of the model's embedding and head."""
    as_model: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    """Settings of a model whose only layer is such a layer."""
    norm_offset: float = 0.0
    is_hidden_first: bool = False
    is_normed: bool = True
    """Whether a layer reads hidden states after the last norm, that of the layer before or the model's."""
    num_layers: int = 1
    like: int = -1
    """The model's layer that it is like."""
    before_feed_forward: str = "post_attention_layernorm"
    added: dict[str, str] = {}  # noqa: RUF012 - nobody changes it
    """What lists of the model's layers have for each of these, too, by key of config.json."""
    architecture: str | None = None
    """That of the checkpoint. None: the one that transformers writes."""


_QWEN = StoredHead(
    *("mtp.layers.{}.", "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", ()),
    {"layer_types": ["full_attention"]},
    norm_offset=1.0,
)
MTP_FAMILIES: dict[str, StoredHead] = {
    "bailing_hybrid": StoredHead(
        final_norm="final_layernorm",
        copies=(),
        as_model={"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]},
        like=1,
    ),
    "deepseek_v3": StoredHead(as_model={"first_k_dense_replace": 0}),
    # a dense layer, and the model's last norm
    "ernie4_5_moe": StoredHead(
        *("model.mtp_block.{}.", "model.", "mtp_emb_norm.{}", "mtp_hidden_norm.{}", "mtp_linear_proj.{}", None, ()),
        is_normed=False,
    ),
    "glm4_moe": StoredHead(as_model={"first_k_dense_replace": 0}, num_layers=3),
    "glm4_moe_lite": StoredHead(as_model={"mlp_layer_types": ["sparse"]}),
    "hy_v3": StoredHead(as_model={"mlp_layer_types": ["sparse"]}),
    # dense layers with windows, sinks and heads of their own
    "mimo_v2_flash": StoredHead(
        *("model.mtp.layers.{}.", "model.mtp.layers.{}.", "enorm", "hnorm", "eh_proj", "final_layernorm", ()),
        {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        is_normed=False,
        num_layers=3,
        like=0,
        before_feed_forward="pre_mlp_layernorm",
    ),
    # MiMo is Qwen2 with such a layer
    "qwen2": StoredHead(
        *("model.mtp_layers.{}.", "model.mtp_layers.{}.", "token_layernorm", "hidden_layernorm", "input_proj"),
        *("final_layernorm", ()),
        {"layer_types": ["full_attention"]},
        is_hidden_first=True,
        is_normed=False,
        num_layers=2,
        architecture="MiMoForCausalLM",
    ),
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_next": _QWEN._replace(as_model={"layer_types": ["full_attention"], "mlp_only_layers": []}),
    # dense layers with windows and heads of their own
    "step3p7": StoredHead(
        as_model={
            "layer_types": ["sliding_attention"],
            "mlp_layer_types": ["dense"],
            "swiglu_limits": None,
            "swiglu_limits_shared": None,
        },
        norm_offset=1.0,
        is_normed=False,
        num_layers=2,
        like=0,
        added={"layer_types": "sliding_attention", "mlp_layer_types": "dense"},
    ),
}
"""By the toy that the checkpoint is made of."""


class MtpCheckpoint:
    """A checkpoint with such layers, and a reference that drafts with them."""

    def __init__(self, family: str, directory: Path) -> None:
        """`directory`: where the checkpoint is made."""
        torch.set_num_threads(1)
        self.path = make_checkpoint(family, directory)
        self._stored = stored = MTP_FAMILIES[family]
        config = AutoConfig.from_pretrained(self.path).get_text_config()
        self._eps = config.rms_norm_eps
        tensors = {name: each for file in self.path.glob("*.safetensors") for name, each in load_file(file).items()}
        layers = range(config.num_hidden_layers)
        like = f"model.layers.{layers[stored.like]}."
        own = {name.removeprefix(like): each for name, each in tensors.items() if name.startswith(like)}
        self._others = [self._make_others(config.hidden_size) for _ in range(stored.num_layers)]
        self._target = self._load(self.path)
        self._heads: list[Any] = []
        model = dict(tensors)
        for index, others in enumerate(self._others):
            changed = {name: each.flip(-1) * (1 - index / 4) for name, each in own.items()}
            self._heads.append(
                self._load(self._write_head(directory / f"head {index}", config, model, changed, others))
            )
            in_file = len(layers) + index if stored.layer.startswith("model.layers.") else index
            layer, beginning = (each.format(in_file) for each in (stored.layer, stored.others))
            for name, each in changed.items():
                tensors[layer + name.replace("post_attention_layernorm", stored.before_feed_forward)] = each
            tensors |= {f"{beginning}{name.format(index)}.weight": each for name, each in others.items()}
            for name, of_model in zip(stored.copies, ("model.embed_tokens", "lm_head"), strict=False):
                tensors[f"{beginning}{name}.weight"] = tensors[f"{of_model}.weight"].clone()
        for file in [*self.path.glob("*.safetensors"), *self.path.glob("*.index.json")]:
            file.unlink()
        _save(self.path, tensors)
        fields = json.loads((self.path / "config.json").read_text())
        text = fields.get("text_config", fields)
        text["num_nextn_predict_layers"] = stored.num_layers
        for key, each in stored.added.items():
            text[key] += [each] * stored.num_layers
        if stored.architecture is not None:
            fields |= {"architectures": [stored.architecture], "model_type": "mimo"}
        (self.path / "config.json").write_text(json.dumps(fields))

    @torch.inference_mode()
    def drafts(self, known: list[int], num: int) -> list[int]:
        """Return what follows the tokens `known`. After the last layer's first token, it gets its own results."""
        stored, found = self._stored, list[int]()
        hidden_TD, _ = _outputs(self._target, stored.is_normed, input_ids=torch.tensor([known[:-1]]))
        for offset in range(num):
            index = min(offset, stored.num_layers - 1)
            others = self._others[index]
            following = torch.tensor([*known[1:], *found])
            embedded_TD = self._norm(self._target.get_input_embeddings()(following), others, stored.embedding_norm)
            halves = [embedded_TD, self._norm(hidden_TD, others, stored.hidden_norm)]
            x_TD = torch.cat(halves[::-1] if stored.is_hidden_first else halves, 1) @ others[stored.projection].T
            out_TD, normed_TD = _outputs(self._heads[index], stored.is_normed, inputs_embeds=x_TD[None])
            found.append(int(self._target.lm_head(normed_TD[-1]).argmax()))
            if offset + 1 < stored.num_layers:
                hidden_TD = torch.cat([torch.zeros_like(out_TD[:1]), out_TD])
            else:
                hidden_TD = torch.cat([hidden_TD, out_TD[-1:]])
        return found

    def _norm(self, x_TD: torch.Tensor, others: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        normed_TD = x_TD / (x_TD.square().mean(-1, keepdim=True) + self._eps).sqrt()
        return normed_TD * (others[name] + self._stored.norm_offset)

    def _make_others(self, size: int) -> dict[str, torch.Tensor]:
        """The tensors that the model's layers don't have."""
        stored = self._stored
        norms = [each for each in (stored.embedding_norm, stored.hidden_norm, stored.final_norm) if each is not None]
        made = {name: 1 - stored.norm_offset + 0.3 * torch.randn(size) for name in norms}
        return made | {stored.projection: torch.randn(size, 2 * size) * 0.2}

    def _write_head(
        self,
        path: Path,
        config: Any,
        model: dict[str, torch.Tensor],
        own: dict[str, torch.Tensor],
        others: dict[str, torch.Tensor],
    ) -> Path:
        """Write a model whose only layer is this one. `config`: the target's, of texts."""
        path.mkdir()
        fields = json.loads((self.path / "config.json").read_text())
        text = config.to_dict() | {"num_hidden_layers": 1} | self._stored.as_model
        text = {key: each for key, each in text.items() if key != "per_layer_config"}
        (path / "config.json").write_text(
            json.dumps(fields | {"text_config": text} if "text_config" in fields else text)
        )
        alone = {name: each for name, each in model.items() if not name.startswith("model.layers.")}
        alone |= {f"model.layers.0.{name}": each for name, each in own.items()}
        final_norm = self._stored.final_norm
        _save(path, alone if final_norm is None else alone | {"model.norm.weight": others[final_norm]})
        return path

    def _load(self, path: Path) -> Any:
        made_by = auto_class(AutoConfig.from_pretrained(path))
        return made_by.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: each.contiguous() for name, each in tensors.items()}, path / "model.safetensors", {"format": "pt"})


def _outputs(model: Any, is_normed: bool, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The final hidden states of a sequence, as the next layer reads them, and after the last norm."""
    before: list[torch.Tensor] = []
    texts = getattr(model.model, "language_model", model.model)
    hook = texts.norm.register_forward_pre_hook(lambda _, given: before.append(given[0]))
    normed_TD = model.model(**inputs).last_hidden_state[0]
    hook.remove()
    return normed_TD if is_normed else before[0][0], normed_TD
