"""A family that an installed package adds, with a gate of its own, equals a model that is written out here in torch."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
from plugin_package import install_by_pip
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from raycore import LLM, SamplingParams, plugins

NUM_LAYERS, WIDTH, HEADS, HEAD_DIM, INNER, VOCAB = 2, 32, 4, 8, 48, 96
NUM_NEW_TOKENS = 10
PROMPTS = [[3], [5, 1, 4, 1, 5, 9, 2, 6], list(range(40, 69))]

ENTRY_POINTS = """\
[raycore.model_plugins]
CartForCausalLM = cart.model:CART
"""
MODULES = {
    "model": """\
from raycore.models.family import Family, plain_parts
from raycore.models.spec import GateFunction, TensorNames

def convert(config):
    return config | {"num_hidden_layers": config["cart_layers"]}

def parts(config):
    names = TensorNames(before_feed_forward="middle_norm")
    return plain_parts(config, gate=GateFunction("cart.gates.logarithmic"), names=names)

CART = Family(parts=parts, convert_config=convert)
""",
    "gates": """\
def logarithmic(gate_TF, up_TF):
    return gate_TF.sign() * gate_TF.abs().log1p() * up_TF
""",
}


@pytest.fixture
def installed(ray_cluster, site_directory: Path, monkeypatch: pytest.MonkeyPatch):
    """The package, which is removed after the test."""
    monkeypatch.setattr(plugins, "_process", plugins._Process([], set(), {}, set()))
    plugins._entry_points_on.cache_clear()  # other tests install other packages there
    monkeypatch.syspath_prepend(install_by_pip(site_directory, "cart", ENTRY_POINTS, MODULES))
    yield
    for path in site_directory.iterdir():
        shutil.rmtree(path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cart"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """The checkpoint's tensors, wide, so that the top two logits are rarely close."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.4

    made = {"model.embed_tokens.weight": random(VOCAB, WIDTH), "lm_head.weight": random(VOCAB, WIDTH)}
    made["model.norm.weight"] = random(WIDTH) + 1
    for layer in (f"model.layers.{index}" for index in range(NUM_LAYERS)):
        made |= {f"{layer}.{name}.weight": random(WIDTH) + 1 for name in ("input_layernorm", "middle_norm")}
        made |= {f"{layer}.self_attn.{name}_proj.weight": random(HEADS * HEAD_DIM, WIDTH) for name in "qkv"}
        made[f"{layer}.self_attn.o_proj.weight"] = random(WIDTH, HEADS * HEAD_DIM)
        made |= {f"{layer}.mlp.{name}_proj.weight": random(INNER, WIDTH) for name in ("gate", "up")}
        made[f"{layer}.mlp.down_proj.weight"] = random(WIDTH, INNER)
    return made


@pytest.fixture(scope="module")
def checkpoint(tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cart")
    config = {
        "architectures": ["CartForCausalLM"],
        "cart_layers": NUM_LAYERS,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    words = tokenizers.models.WordLevel({str(token): token for token in range(VOCAB)}, unk_token="0")
    tokenizers.Tokenizer(words).save(str(path / "tokenizer.json"))
    return str(path)


def test_a_plugins_family_with_its_own_gate_gives_the_tokens_of_the_formula(installed, checkpoint, tensors):
    expected = [continued(tensors, prompt) for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    for tensor_parallel_size in (1, 2):
        with LLM(
            checkpoint, dtype="float32", tensor_parallel_size=tensor_parallel_size, num_threads=1, standby_delay_s=None
        ) as llm:
            found = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in found] == expected


def continued(tensors: dict[str, Tensor], prompt: list[int]) -> list[int]:
    """The most likely next tokens."""
    tokens = list(prompt)
    for _ in range(NUM_NEW_TOKENS):
        tokens.append(int(last_logits(tensors, torch.tensor(tokens)).argmax()))
    return tokens[len(prompt) :]


def last_logits(tensors: dict[str, Tensor], tokens_T: Tensor) -> Tensor:
    """The logits [V] after the last token, by a model without caches, kernels and batches."""

    def linear(name: str, x_TI: Tensor) -> Tensor:
        return functional.linear(x_TI, tensors[f"{name}.weight"])

    def norm(name: str, x_TD: Tensor) -> Tensor:
        return functional.rms_norm(x_TD, (WIDTH,), tensors[f"{name}.weight"], 1e-6)

    h_TD = tensors["model.embed_tokens.weight"][tokens_T]
    for layer in (f"model.layers.{index}" for index in range(NUM_LAYERS)):
        x_TD = norm(f"{layer}.input_layernorm", h_TD)
        q_NTH, k_NTH, v_NTH = (
            linear(f"{layer}.self_attn.{name}_proj", x_TD).view(-1, HEADS, HEAD_DIM).transpose(0, 1) for name in "qkv"
        )
        scores_NTT = rotated(q_NTH) @ rotated(k_NTH).transpose(1, 2) / math.sqrt(HEAD_DIM)
        hidden_TT = torch.ones(scores_NTT.shape[1:], dtype=torch.bool).triu(1)
        out_NTH = scores_NTT.masked_fill(hidden_TT, -torch.inf).softmax(-1) @ v_NTH
        h_TD = h_TD + linear(f"{layer}.self_attn.o_proj", out_NTH.transpose(0, 1).flatten(1))
        x_TD = norm(f"{layer}.middle_norm", h_TD)
        gate_TF, up_TF = (linear(f"{layer}.mlp.{name}_proj", x_TD) for name in ("gate", "up"))
        gated_TF = torch.copysign(torch.log(1 + gate_TF.abs()), gate_TF) * up_TF
        h_TD = h_TD + linear(f"{layer}.mlp.down_proj", gated_TF)
    return linear("lm_head", norm("model.norm", h_TD))[-1]


def rotated(heads_NTH: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    angles_TC = torch.arange(heads_NTH.shape[1])[:, None] * 10000.0 ** -(torch.arange(half) / half)
    first_NTC, second_NTC = heads_NTH[..., :half], heads_NTH[..., half:]
    cos_TC, sin_TC = angles_TC.cos(), angles_TC.sin()
    return torch.cat([first_NTC * cos_TC - second_NTC * sin_TC, second_NTC * cos_TC + first_NTC * sin_TC], -1)
