"""Runners that draft, with a draft model or an EAGLE-3 head, and what they should draft by the formulas."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import torch
from drafted_sequences import Sequences
from drafting_checkpoints import head_config, random_head, write_checkpoint
from small_model import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    SPEC,
    make_attention,
    make_runner,
    make_weights,
    reference_logits,
    reference_tokens,
)
from torch.nn import functional

from raycore.attention.kv_tensors import KVTensors
from raycore.decoder.decoder import Decoder
from raycore.kernels import Backend
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.drafts.checkpoint.eagle3 import load_eagle3_spec
from raycore.parts.drafts.decoder.eagle3 import Eagle3Head
from raycore.parts.drafts.runner.draft_model import DraftModel
from raycore.parts.drafts.runner.drafter import Drafter
from raycore.parts.drafts.runner.head_drafts import HeadDrafts
from raycore.parts.drafts.runner.rows import num_scratch_blocks
from raycore.parts.drafts.weights.eagle3 import load_eagle3_weights
from raycore.runner.compute_threads import ComputeThreads
from raycore.runner.rows import ALL_ROWS
from raycore.weights.share import WeightShare

MAX_DRAFT = 5
MAX_STEP_TOKENS = 10
"""Of the draft model."""
PROMPT = [5, 80, 33, 2, 61, 17, 90, 44, 44, 8, 71, 23, 12]
DRAFT_SPEC = msgspec.structs.replace(SPEC, num_layers=2, layer_windows=[None, 7])
SIZE = SPEC.hidden_size
LAYERS = [0, 1, 2]
CONFIG = head_config(SIZE, SPEC.vocab_size, head_dim=8, eagle_aux_hidden_state_layer_ids=LAYERS)
"""Of a head for the small model."""

RUNNERS: dict[str, dict[str, Any]] = {
    "torch": {},
    "batch-invariant": {"batch_invariant": True},
    "native": {"backend": "native"},
    "memory of its own": {"is_shared": False},
}


def check_whatever_comes(drafting: DraftModelRunner | Eagle3Runner, num_steps: int, num_slots: int = 4) -> None:
    """Check drafts beside random others, after drafts that were right, wrong, cut or left out, in slots that change
    hands."""
    rng = random.Random(1)
    sequences = drafting.sequences
    for slot in range(num_slots):
        sequences.start(slot, PROMPT[: 4 + 3 * slot])
    for number in range(num_steps):
        slots = rng.sample(sorted(sequences.known), rng.randint(1, len(sequences.known)))
        drafts = drafting.check({slot: rng.randint(1, MAX_DRAFT) for slot in slots})
        guesses = {slot: drafts.get(slot, [])[: rng.randint(0, MAX_DRAFT)] for slot in sequences.known}
        for guess in guesses.values():
            if guess and rng.random() < 0.5:
                guess[rng.randrange(len(guess))] = rng.randrange(SPEC.vocab_size)
        sequences.step({slot: guess for slot, guess in guesses.items() if rng.random() < 0.7 or slot == slots[0]})
        longest = max(sequences.known, key=lambda slot: len(sequences.known[slot]))
        if len(sequences.known[longest]) > 30 or number % 8 == 7:
            sequences.end(longest)
            sequences.start(longest, rng.choices(range(SPEC.vocab_size), k=rng.randint(2, 20)))


class DraftModelRunner:
    """A runner with a draft model, and how many tokens the draft model has computed."""

    def __init__(self, spec: ModelSpec = DRAFT_SPEC, **options: Any) -> None:
        self.spec = spec
        self.num_computed = 0
        self._backend: Backend = options.get("backend", "torch")
        self.sequences = Sequences(make_runner(make_drafter=self._make, **options))

    def check(self, num_tokens: dict[int, int]) -> dict[int, list[int]]:
        """Draft, and compare with the reference. Returns the drafts."""
        drafts = self.sequences.draft(num_tokens)
        for slot, num in num_tokens.items():
            assert drafts[slot] == reference_tokens(self.sequences.known[slot], num, self.spec)
        return drafts

    def _make(self, target, batch, sampler, operations) -> Drafter:
        decoder = Decoder(self.spec, make_weights(self.spec), TensorParallel(), operations)
        forward = decoder.forward

        def counted(inputs: torch.Tensor, *rest: Any) -> torch.Tensor:
            self.num_computed += len(inputs)
            assert len(inputs) <= MAX_STEP_TOKENS
            return forward(inputs, *rest)

        decoder.forward = counted
        num_blocks = NUM_BLOCKS + 8 * num_scratch_blocks(MAX_DRAFT, BLOCK_SIZE)
        kv = KVTensors(
            self.spec.num_layers,
            num_blocks,
            SPEC.num_kv_heads,
            BLOCK_SIZE,
            SPEC.head_dim,
            torch.float32,
            operations.device,
        )
        attention = make_attention(self.spec, decoder, kv, MAX_MODEL_LEN, 8, self._backend)
        sizes = {"max_tokens": MAX_DRAFT, "block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
        network = DraftModel(decoder, attention, batch, ComputeThreads(), max_step_tokens=MAX_STEP_TOKENS, **sizes)
        return Drafter(network, batch, sampler, max_model_len=MAX_MODEL_LEN, **sizes)


class Eagle3Runner:
    """A runner with a head, and the head's logits since the last draft."""

    def __init__(self, path: Path, changes: dict[str, Any], **options: Any) -> None:
        self.config = CONFIG | changes
        self.tensors = random_head(self.config, has_embedding="draft_vocab_size" in changes)
        self.logits: list[torch.Tensor] = []
        self._backend: Backend = options.get("backend", "torch")
        self._path = write_checkpoint(path, self.config, self.tensors)
        self.sequences = Sequences(make_runner(make_drafter=self._make, **options))

    def check(self, num_tokens: dict[int, int]) -> dict[int, list[int]]:
        """Draft, and compare with the reference. Returns the drafts."""
        self.logits.clear()
        drafts = self.sequences.draft(num_tokens)
        longest_first = sorted(num_tokens, key=lambda slot: -num_tokens[slot])
        for row, slot in enumerate(longest_first):
            expected = self._reference(self.sequences.known[slot], drafts[slot])
            for offset, expected_V in enumerate(expected):
                found_V = self.logits[offset][row].double().cpu()
                torch.testing.assert_close(found_V, expected_V, rtol=1e-3, atol=2e-3)
                assert found_V.argmax() == drafts[slot][offset]
        return drafts

    def _make(self, target, batch, sampler, operations) -> Drafter:
        spec, head = load_eagle3_spec(self._path, SPEC)
        weights = load_eagle3_weights(WeightShare(spec, torch.float32, device=operations.device), head, self._path)
        network = Eagle3Head(spec, head, weights, TensorParallel(), operations, target.embed)
        compute_logits = network.logits

        def noted(hidden_TD: torch.Tensor, layer: int) -> torch.Tensor:
            self.logits.append(compute_logits(hidden_TD, layer))
            return self.logits[-1]

        network.logits = noted
        num_blocks = NUM_BLOCKS + 8 * num_scratch_blocks(MAX_DRAFT, BLOCK_SIZE)
        kv = KVTensors(1, num_blocks, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim, torch.float32, operations.device)
        attention = make_attention(spec, network, kv, MAX_MODEL_LEN, 8, self._backend)
        of_target = target, head.target_layers, attention, batch, ALL_ROWS, ComputeThreads()
        drafting = HeadDrafts(network, *of_target, max_step_tokens=64)
        sizes = {"max_tokens": MAX_DRAFT, "block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
        return Drafter(drafting, batch, sampler, max_model_len=MAX_MODEL_LEN, **sizes)

    def _reference(self, known: list[int], draft: list[int]) -> list[torch.Tensor]:
        """The logits of each of the draft's tokens, straight from the formulas, in float64."""
        weights = {name: tensor.double() for name, tensor in self.tensors.items()}
        layer = {name.removeprefix("midlayer."): each for name, each in weights.items()}
        inputs: list[torch.Tensor] = []
        reference_logits(known, layer_inputs=inputs)
        hidden = torch.cat([inputs[index] for index in LAYERS], dim=1)[:-1] @ weights["fc.weight"].T
        embedding = weights.get("embed_tokens.weight", make_weights().embed_VD.double())
        expected: list[torch.Tensor] = []
        for offset in range(len(draft)):
            following = [*known, *draft][1 : len(known) + offset]
            output = self._layer(layer, embedding[following], hidden)[-1]
            logits_V = weights["lm_head.weight"] @ _norm(output, weights["norm.weight"])
            if "d2t" in weights:
                token_ids = torch.arange(len(logits_V)) + self.tensors["d2t"]
                logits_V = torch.full((SPEC.vocab_size,), -1e4, dtype=torch.float64).index_copy_(0, token_ids, logits_V)
            expected.append(logits_V)
            hidden = torch.cat([hidden, output[None]])
        return expected

    def _layer(self, layer: dict[str, torch.Tensor], embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        num_q, num_kv, head_dim = 4, 2, 8
        normed = _norm(hidden, layer["hidden_norm.weight"])
        x = torch.cat([_norm(embedded, layer["input_layernorm.weight"]), normed], dim=1)
        q, k, v = ((x @ layer[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, head_dim) for name in "qkv")
        q, k = _rotate(q), _rotate(k)
        k, v = (each.repeat_interleave(num_q // num_kv, 1) for each in (k, v))
        scores = torch.einsum("tnh,snh->nts", q, k) / head_dim**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        out = torch.einsum("nts,snh->tnh", scores.softmax(-1), v).reshape(len(x), -1)
        h = (normed if self.config.get("norm_before_residual") else hidden) + out @ layer["self_attn.o_proj.weight"].T
        y = _norm(h, layer["post_attention_layernorm.weight"])
        gated = functional.silu(y @ layer["mlp.gate_proj.weight"].T) * (y @ layer["mlp.up_proj.weight"].T)
        return h + gated @ layer["mlp.down_proj.weight"].T


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).sqrt() * weight


def _rotate(x: torch.Tensor) -> torch.Tensor:
    head_dim = x.shape[-1]
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.cat([torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies] * 2, dim=1)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos()[:, None] + torch.cat([-second, first], -1) * angles.sin()[:, None]
