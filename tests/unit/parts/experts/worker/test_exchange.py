"""Workers whose number changes move experts and all else that new ones need. Each is a thread of this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import interpreted_triton  # noqa: F401  # before whatever imports Triton
import msgspec
import pytest
import torch
from small_model import SPEC, make_operations
from waiting import LONG_S

from raycore.checkpoint.stages import Stage
from raycore.decoder.decoder import Decoder
from raycore.kernels import library as kernels
from raycore.models.mixers.delta import DeltaSpec
from raycore.models.mixers.kda import KdaSpec
from raycore.models.mixers.latent import LatentHeads
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.models.mixers.short_conv import ShortConvSpec
from raycore.node.listeners import offer
from raycore.parallel import peer_memory
from raycore.parallel.rendezvous import Rendezvous
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.experts.models import ExpertChoice, MoeSpec, SharedExperts
from raycore.parts.experts.worker.exchange import WeightExchange
from raycore.parts.experts.worker.moves import Move, plan_moves
from raycore.weights.loader import DecoderWeights, empty_decoder_weights, random_decoder_weights
from raycore.weights.named import named_weights
from raycore.weights.share import WeightShare

CPU = torch.device("cpu")
MOE = MoeSpec(num_experts=5, num_experts_per_tok=2, intermediate_size=24, sparse_layers=[True, False, True])
MODEL = msgspec.structs.replace(SPEC, architecture="Qwen3MoeForCausalLM", moe=MOE, mlp_bias=False)
SHARED = msgspec.structs.replace(
    MODEL,
    moe=msgspec.structs.replace(
        MOE,
        router=ExpertChoice("sigmoid", has_correction=True, in_float32=True),
        shared=SharedExperts(32, has_gate=True),
    ),
)
BIASED = msgspec.structs.replace(
    MODEL, moe=msgspec.structs.replace(MOE, router=ExpertChoice("softmax_of_chosen", has_bias=True), has_bias=True)
)
STATE = DeltaSpec([True, False, True], 4, k_dim=6, v_dim=10, conv_size=3, num_k_heads=2, is_interleaved=True)
GATED = msgspec.structs.replace(MODEL, state=STATE, attention_gate="query_rows")
SEPARATE = msgspec.structs.replace(GATED, state=msgspec.structs.replace(STATE, is_interleaved=False))
LATENT = msgspec.structs.replace(
    SHARED,
    latent=LatentHeads(rank=10, plain_dim=6, rotated_dim=8, value_dim=5, query_rank=12),
    num_kv_heads=1,
    layer_windows=[None] * 3,
    qk_norm=None,
)
DIRECT = msgspec.structs.replace(LATENT, latent=msgspec.structs.replace(LATENT.latent, query_rank=None))
MAMBA = msgspec.structs.replace(
    MODEL, state=Mamba2Spec([True, False, True], 4, 6, v_dim=10, conv_size=3, num_groups=1, has_conv_bias=True)
)
KDA = msgspec.structs.replace(MODEL, state=KdaSpec([True, False, True], 4, k_dim=6, v_dim=6, conv_size=3))
LING = msgspec.structs.replace(
    LATENT,
    latent=msgspec.structs.replace(LATENT.latent, has_gate=True),
    state=msgspec.structs.replace(KDA.state, is_direct=True, least_decay=-5.0),
)
CONVOLVED = msgspec.structs.replace(MODEL, state=ShortConvSpec([True, False, True], MODEL.hidden_size, 3, True))
ALONE = msgspec.structs.replace(
    SHARED,
    is_gated=False,
    gate="relu2",
    moe=msgspec.structs.replace(SHARED.moe, is_gated=False, inner_size=12),
    state=MAMBA.state,
    parts_alone=["mixer", "mixer", "feed_forward"],
)
TIED = msgspec.structs.replace(MODEL, tie_word_embeddings=True)
NATIVE = "native" if kernels.load() is not None else "torch"
BACKENDS = ["torch", NATIVE, "triton"]


def weights_of(spec, share, dtype=torch.float32) -> DecoderWeights:
    return random_decoder_weights(WeightShare(spec, dtype, experts=share), seed=5)


def make_decoder(spec, weights: DecoderWeights, backend: str, *, batch_invariant: bool = False) -> Decoder:
    operations = make_operations(backend, batch_invariant=batch_invariant)
    return Decoder(spec, weights, TensorParallel(), operations, stage=Stage.whole(spec))


def all_weights(spec, decoder: Decoder, experts: range) -> DecoderWeights:
    """What the decoder was made of, with its experts."""
    weights = decoder.outer_weights()
    weights.layers = [decoder.layer_weights(index) for index in range(len(decoder.stage.layers))]
    sparse = iter(decoder.sparse_layers)
    for layer in weights.layers:
        if hasattr(layer.feed_forward, "router_ED"):
            held = [*map(next(sparse).experts.weights_of, experts)]
            layer.feed_forward.gate_up_EFD = torch.stack([each.gate_up_FD for each in held])
            layer.feed_forward.down_EDF = torch.stack([each.down_DF for each in held])
            if spec.moe.has_bias:
                layer.feed_forward.gate_up_bias_EF = torch.stack([each.gate_up_bias_F for each in held])
                layer.feed_forward.down_bias_ED = torch.stack([each.down_bias_D for each in held])
    return weights


def assert_same(found: DecoderWeights, expected: DecoderWeights) -> None:
    pairs = zip(named_weights(found), named_weights(expected), strict=True)
    for (name, tensor), (expected_name, expected_tensor) in pairs:
        assert name == expected_name
        assert tensor.dtype == expected_tensor.dtype
        assert torch.equal(tensor, expected_tensor), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "spec",
    [MODEL, TIED, SHARED, BIASED, LATENT, DIRECT, GATED, SEPARATE, MAMBA, KDA, CONVOLVED, ALONE, LING],
    ids=[
        *("untied", "tied", "shared experts", "biases", "latent attention", "latent attention of queries"),
        *("states by head", "states", "Mamba-2", "Kimi's delta attention", "short convolution", "parts alone"),
        "gates of latent attention, direct decays",
    ],
)
def test_a_decoders_weights_are_read_back_unchanged(backend, dtype, spec):
    experts = MOE.whole_experts(1, 2)
    decoder = make_decoder(spec, weights_of(spec, experts, dtype), backend)
    assert_same(all_weights(spec, decoder, experts.experts), weights_of(spec, experts, dtype))


def test_a_float32_weight_stored_in_fewer_bits_is_read_back_unchanged():
    spec, share = MODEL, MOE.whole_experts(0, 1)
    weights = [weights_of(spec, share) for _ in range(2)]
    for each in weights:
        for layer in each.layers[::2]:
            layer.feed_forward.gate_up_EFD[1::2] = layer.feed_forward.gate_up_EFD[1::2].bfloat16().float()
            layer.feed_forward.down_EDF[2] = layer.feed_forward.down_EDF[2].half().float()
    decoder = make_decoder(spec, weights[0], NATIVE)
    assert_same(all_weights(spec, decoder, share.experts), weights[1])


def test_planned_moves_are_few_and_give_every_worker_its_experts():
    assert plan_moves(MOE, 1, 2, 1) == [Move(0, 1, range(2, 5), is_new=True)]
    assert plan_moves(MOE, 2, 1, 1) == [Move(1, 0, range(2, 5), is_new=False)]
    # a new worker that gets no expert from its rank's part of the model
    assert plan_moves(MOE, 2, 3, 1) == [
        Move(0, 1, range(1, 2), is_new=False),
        Move(0, 2, range(0), is_new=True),
        Move(1, 2, range(3, 5), is_new=False),
    ]
    for before in range(1, 5):
        for after in range(1, 9):
            for tp_size in (1, 2):
                check_moves(before, after, tp_size)


def check_moves(before: int, after: int, tp_size: int) -> None:
    held = {worker: set(MOE.whole_experts(worker, before * tp_size).experts) for worker in range(before * tp_size)}
    got = {worker: set(held.get(worker, ())) for worker in range(after * tp_size)}
    served = []
    for move in plan_moves(MOE, before, after, tp_size):
        assert set(move.experts) <= held[move.source]
        got[move.target] |= set(move.experts)
        if move.is_new:
            served.append(move.target)
            assert move.source % tp_size == move.target % tp_size
    assert served == list(range(before * tp_size, after * tp_size))
    for worker in range(after * tp_size):
        assert got[worker] >= set(MOE.whole_experts(worker, after * tp_size).experts)


class Workers:
    """Workers of one stage, and the decoder of each."""

    def __init__(self, spec, num_ranks: int, backends: list[str], *, batch_invariant: bool = False) -> None:
        self.spec, self.backends, self.batch_invariant = spec, backends, batch_invariant
        self.num_ranks = num_ranks
        self.decoders = [
            self.made(rank, weights_of(spec, MOE.whole_experts(rank, num_ranks))) for rank in range(num_ranks)
        ]

    def made(self, rank: int, weights: DecoderWeights) -> Decoder:
        return make_decoder(self.spec, weights, self.backends[rank], batch_invariant=self.batch_invariant)

    def change(self, num_ranks: int) -> None:
        moves, where = plan_moves(MOE, self.num_ranks, num_ranks, 1), offer("127.0.0.1")
        size = max(num_ranks, self.num_ranks)

        def take_part(rank: int) -> Decoder:
            workers = Rendezvous(where, rank, size, CPU, timeout_s=LONG_S)
            exchange = WeightExchange(workers, 0, rank, moves)
            workers.part()
            share = MOE.whole_experts(rank, num_ranks) if rank < num_ranks else None
            with torch.inference_mode():
                if rank < self.num_ranks:
                    decoder = self.decoders[rank]
                    exchange.exchange(decoder, share.experts if share else range(0))
                else:
                    weights = empty_decoder_weights(WeightShare(self.spec, torch.float32, experts=share))
                    exchange.receive(weights)
                    decoder = self.made(rank, weights)
            exchange.close()
            workers.close()
            return decoder

        with ThreadPoolExecutor(size) as pool:
            self.decoders = list(pool.map(take_part, range(size)))[:num_ranks]
        self.num_ranks = num_ranks


@pytest.mark.parametrize("shares_memory", [True, False], ids=["one node", "several nodes"])
@pytest.mark.parametrize(
    "backends", [["torch"] * 4, [NATIVE, "torch", NATIVE, NATIVE], ["triton"] * 4], ids=["torch", "mixed", "gpu"]
)
@pytest.mark.parametrize("spec", [MODEL, SHARED, BIASED], ids=["routed", "shared experts", "biases"])
def test_workers_have_the_same_weights_after_moves_as_after_loading(monkeypatch, shares_memory, backends, spec):
    if not shares_memory:
        monkeypatch.setattr(peer_memory, "_open", lambda store, num_bytes: None)
    workers = Workers(spec, 2, backends)
    for num_ranks in (3, 4, 2, 1, 3):
        workers.change(num_ranks)
        for rank, decoder in enumerate(workers.decoders):
            share = MOE.whole_experts(rank, num_ranks)
            assert_same(all_weights(spec, decoder, share.experts), weights_of(spec, share))


def test_layers_that_were_replaced_are_not_kept():
    workers = Workers(MODEL, 1, ["torch"] * 2, batch_invariant=True)
    operations = workers.decoders[0]._operations
    num_linear = len(operations._tiled)
    workers.change(2)
    assert len(operations._tiled) < num_linear
