"""Moves weights between the workers of a stage, when the number of ranks that share experts changes.

Weights travel in the form that checkpoints have, in the model's dtype. Each worker then makes layers of them as if it
had read them. So workers may keep weights in different forms: on processors with different kernels, for example.
"""

from __future__ import annotations

from collections.abc import Sequence

from raycore.decoder.network import Network
from raycore.parallel.links import Link
from raycore.parallel.rendezvous import Rendezvous
from raycore.parts.experts.weights import ExpertWeights, MoeWeights
from raycore.parts.experts.worker.moves import Move
from raycore.weights.loader import DecoderWeights
from raycore.weights.named import dense_tensors

_LINK_BYTES = 4 << 20
"""Size of a link's buffer. Larger weights are sent in pieces."""


class WeightExchange:
    """One worker's part in the moves of its stage. All workers of the stage make the same calls."""

    def __init__(self, workers: Rendezvous, stage: int, worker: int, moves: Sequence[Move]) -> None:
        """Connect to the workers that this one gets weights from, or sends weights to.

        Args:
            workers: all workers that take part.
            worker: this worker's number in `moves`.
            moves: all moves of the stage.
        """
        self._worker = worker
        self._moves = [move for move in moves if worker in (move.source, move.target)]
        # All connect, send and receive in the order of the moves, so they never wait for each other in a circle.
        self._links: list[Link] = [
            workers.link(
                f"weights of stage {stage} from {move.source} to {move.target}",
                sends=move.source == worker,
                capacity_bytes=_LINK_BYTES,
            )
            for move in self._moves
        ]

    def exchange(self, network: Network, experts: range) -> None:
        """Send what others get from this worker, and receive what it gets. It then holds these experts."""
        for move, link in self._dense_moves():
            assert move.source == self._worker, "a worker with weights is not new"
            for tensor in network.dense_tensors():
                link.send(tensor.contiguous())
        for layer in network.sparse_layers:
            received: dict[int, ExpertWeights] = {}
            for move, link in zip(self._moves, self._links, strict=True):
                for expert in move.experts:
                    if move.source == self._worker:
                        _send(link, layer.experts.weights_of(expert))
                    else:
                        received[expert] = _receive(link, layer.empty_expert())
            layer.experts.set_experts(experts, received)

    def receive(self, weights: DecoderWeights) -> None:
        """Take part with a new worker: fill all of its weights."""
        for _, link in self._dense_moves():
            for tensor in dense_tensors(weights):
                link.receive_into(tensor)
        for own in (layer.feed_forward for layer in weights.layers):
            if not isinstance(own, MoeWeights):
                continue
            for move, link in zip(self._moves, self._links, strict=True):
                for expert in move.experts:
                    _receive(link, own.expert(expert - own.first_expert))

    def close(self) -> None:
        """Disconnect, once the others have got everything."""
        for move, link in zip(self._moves, self._links, strict=True):
            if move.source == self._worker:
                link.finish()
            link.close()

    def _dense_moves(self) -> list[tuple[Move, Link]]:
        return [(move, link) for move, link in zip(self._moves, self._links, strict=True) if move.is_new]


def _send(link: Link, weights: ExpertWeights) -> None:
    for tensor in weights.tensors:
        link.send(tensor.contiguous())


def _receive(link: Link, into: ExpertWeights) -> ExpertWeights:
    for tensor in into.tensors:
        link.receive_into(tensor)
    return into
