"""Trains a layer that predicts the next token but one, for the bundled model, and writes both as one checkpoint.

The layer learns from the model: texts that the model has generated, and its probabilities of their tokens. It is
trained for its first draft and, with less weight, for the second, which it makes from its own output. The checkpoint is
MiMo's, whose layers are Llama's with biases, which are 0 here.

The bundled model has 4 layers, so that its steps take hardly longer than a draft. With `--idle-layers`, layers that add
nothing follow, and a step takes as long as a deeper model's. What drafts gain is measured by another program:

    python benchmarks/mtp_head.py DIR
    python benchmarks/speculation.py DIR --speculative-config '{"method": "mtp", "num_speculative_tokens": 2}'
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2Model

from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path

_PREFIX = "model.mtp_layers.0."
_SECOND = 0.5
"""The weight of the second draft."""


class TrainedHead(nn.Module):
    """The layer, and what makes its input."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm, self.hidden_layernorm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = Qwen2Model(config)
        self.final_layernorm, self.layer.norm = self.layer.norm, nn.Identity()

    def forward(self, embedded_BTD: Tensor, hidden_BTD: Tensor) -> Tensor:
        """Return the hidden states after the layer, before its norm, for those of the model before its last norm."""
        halves = [self.hidden_layernorm(hidden_BTD), self.token_layernorm(embedded_BTD)]
        return self.layer(inputs_embeds=self.input_proj(torch.cat(halves, -1))).last_hidden_state

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors, by their names in a checkpoint."""
        own = {name: each for name, each in self.state_dict().items() if not name.startswith("layer.embed_tokens")}
        return {f"{_PREFIX}{name.removeprefix('layer.layers.0.')}": each for name, each in own.items()}


def main() -> None:
    """Train, and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="must not exist")
    parser.add_argument("--texts", type=int, default=2000, help="from which the layer learns")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=16, help="texts in a step")
    parser.add_argument("--idle-layers", type=int, default=0, help="layers that add nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)  # more wait for each other in layers as small as these
    torch.manual_seed(0)
    texts_NT = torch.tensor(_texts(args.texts))
    target = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    config = Qwen2Config(**target.config.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    head = TrainedHead(config)
    optimizer = torch.optim.AdamW(head.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    for step in range(args.steps):
        losses = _losses(target, head, texts_NT[torch.randint(len(texts_NT), (args.batch,))])
        optimizer.zero_grad()
        (losses[0] + _SECOND * losses[1]).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == args.steps - 1:
            print(f"step {step}: {', '.join(f'{loss.item():.3f}' for loss in losses)}", flush=True)
    _write(args.directory, head, args.idle_layers)


def _texts(number: int) -> list[list[int]]:
    """Return tokens that the model generates after random problems, half of them at temperature 1."""
    rng = random.Random(0)
    prompts = [f"{rng.randrange(1000)} {rng.choice('+-')} {rng.randrange(1000)} =" for _ in range(number)]
    params = [SamplingParams(temperature=i % 2, max_tokens=96, ignore_eos=True, seed=i) for i in range(number)]
    with LLM(demo_model_path(), standby_delay_s=None) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    texts = [[*(output.prompt_token_ids or []), *output.outputs[0].token_ids] for output in outputs]
    length = min(map(len, texts))
    return [text[:length] for text in texts]


def _losses(target: Any, head: TrainedHead, texts_BT: Tensor) -> list[Tensor]:
    """Return the losses of the first and of the second draft."""
    before: list[Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda _, given: before.append(given[0]))
    with torch.no_grad():
        probabilities_BTV = target(texts_BT).logits.softmax(-1)
        hook.remove()
        (hidden_BTD,) = before
        embedded_BTD = target.get_input_embeddings()(texts_BT)
    losses: list[Tensor] = []
    for draft in (1, 2):
        hidden_BTD = head(embedded_BTD[:, draft:], hidden_BTD[:, : texts_BT.shape[1] - draft])
        found = target.lm_head(head.final_layernorm(hidden_BTD)).log_softmax(-1)
        losses.append(kl_div(found.flatten(0, 1), probabilities_BTV[:, draft:].flatten(0, 1), reduction="batchmean"))
    return losses


def _write(directory: Path, head: TrainedHead, num_idle: int) -> None:
    """Write the model with the layer, and with `num_idle` layers that add nothing."""
    source = Path(demo_model_path())
    shutil.copytree(source, directory)
    fields = json.loads((source / "config.json").read_text())
    num_layers = fields["num_hidden_layers"]
    fields |= {
        "num_hidden_layers": num_layers + num_idle,
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
    }
    (directory / "config.json").write_text(json.dumps(fields))
    tensors = load_file(source / "model.safetensors")
    for name in [
        name for name in tensors if "self_attn." in name and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
    ]:
        tensors[name.replace(".weight", ".bias")] = torch.zeros(len(tensors[name]), dtype=tensors[name].dtype)
    last = f"model.layers.{num_layers - 1}."
    for name in [name for name in tensors if name.startswith(last)]:
        adds_nothing = name.endswith(("o_proj.weight", "down_proj.weight"))
        for layer in range(num_layers, num_layers + num_idle):
            own = torch.zeros_like(tensors[name]) if adds_nothing else tensors[name].clone()
            tensors[name.replace(last, f"model.layers.{layer}.")] = own
    dtype = tensors["model.norm.weight"].dtype
    tensors |= {name: each.to(dtype).contiguous() for name, each in head.tensors().items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
