"""The contract of networks: decoders, a plugin's decoder, encoders and networks of transformers pass it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from encoder_checkpoints import make_encoder
from families import make_checkpoint
from small_model import (
    BLOCK_SIZE,
    CPU,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    SPEC,
    make_attention,
    make_weights,
    new_request,
    plan,
)
from torch import Tensor

from raycore.attention.kv_tensors import KVTensors
from raycore.attention.spec import Attention
from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stored_model import fit_model
from raycore.decoder.decoder import Decoder
from raycore.decoder.network import NO_TAPS, ComputeLayer, Network, Taps, both_taps
from raycore.encoder import attention as encoder_attention
from raycore.encoder.encoder import Encoder
from raycore.encoder.weights import load_encoder_weights
from raycore.fallback.decoder import TransformersDecoder
from raycore.fallback.networks import load_network
from raycore.layers.operations import Operations
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.experts.models import MoeSpec
from raycore.parts.pooling.models.forms import PoolingChoice
from raycore.parts.weights.worker.in_place import weight_tensors
from raycore.step.batch import SlotBatch
from raycore.step.device_batch import DeviceBatch
from raycore.weights.loader import random_decoder_weights
from raycore.weights.share import WeightShare

PROMPTS = [[5, 9, 11, 3], [7], [8, 4, 20, 33, 6, 2, 19]]
NUM_TOKENS = sum(map(len, PROMPTS))
KEPT = torch.tensor([3, 4, 11])
"""The last token of each prompt."""
MOE = MoeSpec(num_experts=4, num_experts_per_tok=2, intermediate_size=24, sparse_layers=[True, False, True])
SPARSE = msgspec.structs.replace(SPEC, architecture="Qwen3MoeForCausalLM", moe=MOE, mlp_bias=False)


class PluginDecoder(Decoder):
    """As a plugin's class may be: its order of operations is its own."""

    def forward(self, inputs: Tensor, *rest: Any, **options: Any) -> Tensor:
        return super().forward(inputs, *rest, **options)


@dataclass
class Computed:
    """A network, and what its steps need."""

    network: Network
    attention: Attention
    spec: ModelSpec

    def step(self, compute: Callable[[Tensor, Attention], Tensor] | None = None) -> Tensor:
        """Run a step with whole prompts. `compute`: gets the tokens, and what `around` has returned."""
        attention, followers = self.network.around(self.attention)
        blocks = iter(range(NUM_BLOCKS))
        new = [new_request(slot, tokens, [next(blocks) for _ in range(8)], 0) for slot, tokens in enumerate(PROMPTS)]
        batch = DeviceBatch(SlotBatch(len(PROMPTS), MAX_MODEL_LEN, BLOCK_SIZE), CPU)
        first = plan(range(len(PROMPTS)), [*map(len, PROMPTS)], new_requests=new)
        for each in (batch, *followers):
            each.apply(first)
        step, tensors = batch.advance(first)
        with torch.inference_mode():
            attention.begin(step, tensors)
            return (compute or self.network.forward)(batch.token_ids_of(tensors), attention)


def with_cache(network: Network, spec: ModelSpec) -> Computed:
    heads = spec.attentions[0].heads(spec, 1)
    kv = KVTensors(spec.num_layers, NUM_BLOCKS, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim, torch.float32, CPU)
    return Computed(network, make_attention(spec, network, kv, MAX_MODEL_LEN, 8), spec)  # pyright: ignore


def decoder(path: Path, spec: ModelSpec = SPEC, made: type[Decoder] = Decoder) -> Computed:
    weights = make_weights(spec) if spec.moe is None else random_decoder_weights(WeightShare(spec, torch.float32), 3)
    return with_cache(made(spec, weights, TensorParallel(), Operations(CPU)), spec)


def encoder(path: Path, architecture: str) -> Computed:
    path = make_encoder(path, architecture)
    spec = fit_model(load_model_spec(path, pooling=PoolingChoice()), path)
    weights = load_encoder_weights(WeightShare(spec, torch.float32), path)
    heads = encoder_attention.EncoderHeads.of(spec, 1, spec.max_length, torch.float32, CPU)
    network = Encoder(spec, weights, TensorParallel(), Operations(CPU))
    return Computed(network, encoder_attention.make_attention(heads, is_native=False, batch_invariant=False), spec)


def by_transformers(path: Path, name: str) -> Computed:
    path = make_checkpoint(name, path)
    spec = load_model_spec(path, "transformers", None)
    network = load_network(path, torch.float32, None)
    return with_cache(TransformersDecoder(spec, network, TensorParallel(), Operations(CPU)), spec)


NETWORKS: dict[str, Callable[[Path], Computed]] = {
    "decoder": decoder,
    "decoder with experts": lambda path: decoder(path, SPARSE),
    "a plugin's decoder": lambda path: decoder(path, made=PluginDecoder),
    "BERT": lambda path: encoder(path, "BertModel"),
    "ModernBERT": lambda path: encoder(path, "ModernBertModel"),
    "Llama by transformers": lambda path: by_transformers(path, "llama3"),
    "GPT-2 by transformers": lambda path: by_transformers(path, "gpt2"),
}
GENERATING = [name for name in NETWORKS if "BERT" not in name]


@pytest.fixture
def computed(request: pytest.FixtureRequest, tmp_path: Path) -> Computed:
    return NETWORKS[request.param](tmp_path)


every_network = pytest.mark.parametrize("computed", NETWORKS, indirect=True)


@every_network
def test_a_network_says_of_what_size_it_is(computed: Computed) -> None:
    network, spec = computed.network, computed.spec
    assert (network.vocab_size, network.hidden_size) == (spec.vocab_size, spec.hidden_size)
    assert network.stage.layers == range(spec.num_layers)
    assert network.dtype == torch.float32
    assert network.num_weights > spec.num_layers * spec.hidden_size**2
    assert (network.num_key_value_numbers > 0) == (spec.encoder is None)
    assert len(network.constants) == spec.num_layers


@every_network
def test_a_network_has_a_constructor_of_its_own(computed: Computed) -> None:
    """None is another kind of network of which it only uses a part."""
    kinds = type(computed.network).__mro__
    own = kinds[kinds.index(Network) - 1]
    assert own in (Decoder, Encoder, TransformersDecoder)
    assert "__init__" in vars(own)


@every_network
def test_all_rows_are_kept_or_those_that_are_asked_for(computed: Computed) -> None:
    hidden_TD = computed.step()
    assert hidden_TD.shape == (NUM_TOKENS, computed.spec.hidden_size)
    kept_RD = computed.step(lambda tokens, attention: computed.network.forward(tokens, attention, KEPT))
    torch.testing.assert_close(kept_RD, hidden_TD[KEPT], atol=1e-5, rtol=1e-4)


@every_network
def test_ends_of_layers_are_told(computed: Computed) -> None:
    ends: list[None] = []
    computed.step(
        lambda tokens, attention: computed.network.forward(tokens, attention, None, lambda: ends.append(None))
    )
    assert len(ends) in (computed.spec.num_layers - 1, computed.spec.num_layers)


@every_network
def test_taps_get_the_inputs_of_layers_and_may_change_them(computed: Computed) -> None:
    network, seen = computed.network, dict[int, Tensor]()
    assert network.takes_taps == isinstance(network, Decoder)
    if not network.takes_taps:
        return
    taps = {layer: lambda h_TD, layer=layer: seen.update({layer: h_TD.clone()}) for layer in (0, 2)}
    hidden_TD = computed.step(lambda tokens, attention: network.forward(tokens, attention, taps=taps))
    assert torch.equal(hidden_TD, computed.step())
    assert torch.equal(seen[0], network.vocabulary.embed(torch.tensor([each for tokens in PROMPTS for each in tokens])))
    changing = {2: lambda h_TD: h_TD.add_(1.0)}
    assert not torch.equal(
        hidden_TD, computed.step(lambda tokens, attention: network.forward(tokens, attention, taps=changing))
    )


@every_network
def test_layers_are_computed_by_what_records_them(computed: Computed) -> None:
    network, ran = computed.network, list[ComputeLayer]()
    assert network.can_record_layers == (type(network) is Decoder)
    if not network.can_record_layers:
        return

    def run(
        layers: Sequence[ComputeLayer], h_TD: Tensor, attention: Attention, after_layer: Callable[[], None]
    ) -> Tensor:
        ran.extend(layers)
        for layer in layers:
            h_TD = layer(h_TD, attention)
        return h_TD

    hidden_TD = computed.step(lambda tokens, attention: network.forward(tokens, attention, run_layers=run))
    assert torch.equal(hidden_TD, computed.step())
    assert len(set(ran)) == computed.spec.num_layers
    ran.clear()
    computed.step(lambda tokens, attention: network.forward(tokens, attention, KEPT, run_layers=run))
    assert len(ran) == computed.spec.num_layers - 1, "the last one computes few rows to the end"


@pytest.mark.parametrize("computed", GENERATING, indirect=True)
def test_embeddings_of_tokens_are_as_good_as_tokens(computed: Computed) -> None:
    network = computed.network
    given = computed.step(lambda tokens, attention: network.forward(network.vocabulary.embed(tokens), attention))
    torch.testing.assert_close(given, computed.step())
    with torch.inference_mode():
        assert network.vocabulary.logits(given[KEPT]).shape == (len(KEPT), computed.spec.vocab_size)


@pytest.mark.parametrize("computed", ["BERT"], indirect=True)
def test_a_network_without_a_vocabulary_says_so(computed: Computed) -> None:
    with pytest.raises(AssertionError, match="Encoder generates no texts"):
        _ = computed.network.vocabulary


@every_network
def test_profiles_can_replace_each_part_of_a_step(computed: Computed) -> None:
    """An attribute that isn't there would end a profile."""
    parts = [(owner, names) for owner, names in computed.network.parts() if names]
    assert parts
    for owner, names in parts:
        assert all(getattr(owner, attribute) is not None for attribute in names)


@every_network
def test_weights_are_divided_into_layers_and_the_rest_if_they_can_be_replaced(computed: Computed) -> None:
    network = computed.network
    parts = network.weight_parts
    assert bool(parts.layers) == (computed.spec.why_weights_stay is None)
    if not parts.layers:
        assert not parts.outside_layers
        return
    assert len(parts.layers) == computed.spec.num_layers
    found = {each.data_ptr() for each in weight_tensors((parts.layers, parts.outside_layers)).values()}
    assert found == {each.data_ptr() for each in weight_tensors(network).values()}


@every_network
def test_only_layers_with_experts_are_shared_and_only_their_networks_send_weights(computed: Computed) -> None:
    network, moe = computed.network, computed.spec.moe
    assert len(network.sparse_layers) == (0 if moe is None else 2)
    for layer in network.sparse_layers:
        one = layer.empty_expert()
        assert (one.gate_up_FD.shape, one.down_DF.shape) == ((48, 32), (32, 24))
        assert layer.num_weights_of(4) == 2 * 3 * 32 * 24, "a token goes to 2 of 4 experts"
    if moe is not None:
        sent = [*network.dense_tensors()]
        assert all(np.prod(each.shape) for each in sent)
        assert sum(each.numel() for each in sent) < sum(each.numel() for each in weight_tensors(network).values())


@pytest.mark.parametrize("is_rounded", [False, True])
def test_embeddings_are_multiplied_by_a_rounded_number_if_the_family_rounds_it(is_rounded: bool) -> None:
    dtype, multiplier = torch.bfloat16, 3072**0.5
    plain = Decoder(SPEC, make_weights(SPEC, dtype), TensorParallel(), Operations(CPU))
    spec = msgspec.structs.replace(SPEC, embedding_multiplier=multiplier, rounds_embedding_multiplier=is_rounded)
    decoder = Decoder(spec, make_weights(spec, dtype), TensorParallel(), Operations(CPU))
    ids = torch.arange(SPEC.vocab_size)
    expected = plain.embed(ids).float() * (55.5 if is_rounded else multiplier)
    assert torch.equal(decoder.embed(ids), expected.to(dtype))


def test_taps_of_one_layer_are_called_in_their_order() -> None:
    def adding(number: float) -> Callable[[torch.Tensor], None]:
        return lambda hidden_TD: hidden_TD.mul_(2).add_(number)  # pyright: ignore[reportReturnType]

    first: Taps = {0: adding(1), 2: adding(3)}
    then: Taps = {2: adding(5), 4: adding(7)}
    joined = both_taps(first, then)
    hidden_TD = {layer: torch.ones(1, 1) for layer in joined}
    for layer, tap in joined.items():
        tap(hidden_TD[layer])
    assert {layer: each.item() for layer, each in hidden_TD.items()} == {0: 3, 2: 15, 4: 9}
    assert both_taps(first, NO_TAPS) is first
    assert both_taps(NO_TAPS, then) is then
