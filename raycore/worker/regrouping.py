"""What a worker has to hold, and to move, if another number of ranks shares experts.

Bytes are those of the dtypes that weights travel in. A CPU's kernels may need fewer, because they shorten weights.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from raycore.config import EngineConfig
from raycore.models.moe import ExpertShare
from raycore.parallel.rendezvous import Rendezvous
from raycore.weights.linear_formats import CONVERTED, LinearFormats
from raycore.weights.loader import empty_decoder_weights
from raycore.weights.named import named_weights
from raycore.weights.share import WeightShare
from raycore.worker.expert_moves import plan_moves
from raycore.worker.rank import Regrouping, WorkerRank
from raycore.worker.weight_exchange import WeightExchange


def expert_share(config: EngineConfig, rank: WorkerRank) -> ExpertShare | None:
    """Return the whole experts that a worker holds with expert parallelism; otherwise None.

    A worker whose rank leaves holds none.
    """
    moe = config.model.spec.moe
    if moe is None or not config.parallel.enable_expert_parallel:
        return None
    share = moe.whole_experts(rank.ep_rank, rank.ep_size)
    return share if rank.ep_rank < rank.ep_size else share._replace(experts=range(0))


def weight_share(
    config: EngineConfig,
    rank: WorkerRank,
    dtype: torch.dtype,
    device: torch.device,
    formats: LinearFormats = CONVERTED,
) -> WeightShare:
    """Return a worker's share of the model's weights."""
    stage, experts = config.stages()[rank.pp_rank], expert_share(config, rank)
    return WeightShare(config.model.spec, dtype, rank.tp_rank, rank.tp_size, stage, experts, device, formats)


def weight_bytes(share: WeightShare) -> int:
    """Return the size of all weights of a worker."""
    weights = empty_decoder_weights(replace(share, device=torch.device("meta")))
    total = 0
    for _, tensor in named_weights(weights):
        assert isinstance(tensor, torch.Tensor), "models with experts aren't quantized"
        total += tensor.nbytes
    return total


def make_exchange(
    workers: Rendezvous, regrouping: Regrouping, config: EngineConfig, rank: WorkerRank
) -> WeightExchange:
    """Connect a worker to those that it sends weights to, and gets weights from."""
    moe = config.model.spec.moe
    assert moe is not None, "only ranks that share experts are regrouped"
    moves = plan_moves(moe, regrouping.num_ranks_before, regrouping.num_ranks, rank.tp_size)
    return WeightExchange(workers, rank.pp_rank, rank.ep_rank, moves)


def num_held(config: EngineConfig, rank: WorkerRank) -> int:
    """Return how many experts of each sparse layer a worker holds."""
    share = expert_share(config, rank)
    return 0 if share is None else len(share.experts)
