"""The workers that one worker computes with: those of its engine, and those that share experts with it."""

from __future__ import annotations

from contextlib import suppress

import torch

from raycore.errors import InvalidConfig
from raycore.parallel.context_parallel import ContextParallel
from raycore.parallel.default_group import DefaultGroup
from raycore.parallel.divided_rows import DividedRows
from raycore.parallel.links import Link
from raycore.parallel.meeting import Meeting, PeerFailed
from raycore.parallel.rendezvous import Rendezvous
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.experts.models import experts_of
from raycore.parts.experts.parallel import ExpertParallel
from raycore.parts.experts.worker.exchange import WeightExchange
from raycore.parts.experts.worker.moves import plan_moves
from raycore.runner.rows import ALL_ROWS, StepRows
from raycore.worker.rank import Regrouping, WorkerRank
from raycore.worker.setup import WorkerSetup

_TELL_S = 5.0
"""How long, in seconds, a worker that fails tries to reach others that it hasn't met."""


class WorkerGroups:
    """A worker's groups and links. It has none before `join`."""

    def __init__(self) -> None:
        self.ranks = TensorParallel()
        """The workers of the same stage of this engine."""
        self.context: ContextParallel | None = None
        """The workers with other tokens' keys and values of the same heads. None: this one has those of all tokens."""
        self.rows: StepRows = ALL_ROWS
        """The workers that have the same weights, with which this one divides steps' rows."""
        self.experts: ExpertParallel | None = None
        """The workers of the same stage of all engines. None: the ranks share no experts."""
        self.source: Link | None = None
        """From the stage before."""
        self.sink: Link | None = None
        """To the next stage."""
        self.token_links: list[Link] = []
        """Between the last stage and earlier ones: take sampled tokens there."""
        self._links: list[Link] = []
        """The links that there are."""
        self._default: DefaultGroup | None = None
        """None: no methods of an extension need it."""
        self._engine_workers: Rendezvous | None = None
        self._expert_workers: Rendezvous | None = None
        self._told: list[Meeting] = []
        """Those that heard of this worker's failure before they met it. A leader tells those that come later, too."""
        self._can_disconnect = False
        """Whether groups can be left at any time. On GPUs that may take as long as an operation that never ends."""

    def join(self, setup: WorkerSetup) -> None:
        """Connect to the other workers. One that joins workers that already run shares experts after `regroup`.

        Raises:
            InvalidConfig: an address at which workers meet is missing.
        """
        self._can_disconnect = setup.device.type == "cpu"
        if setup.rank.world_size > 1:
            self._join_engine(setup)
        elif setup.config.parallel.worker_extension_cls is not None:
            self._default = DefaultGroup(None, 0, 1, setup.device, setup.config.executor.init_timeout_s)
        if setup.config.parallel.is_lockstep and not setup.rank.is_new:
            self._join_experts(setup)

    def regroup(self, setup: WorkerSetup, regrouping: Regrouping) -> WeightExchange:
        """Leave the workers that this one shares experts with, and join others, as `setup` has it.

        Returns what moves weights between the workers. All workers of all ranks do this at the same time.
        """
        moe, rank = experts_of(setup.config.model.spec), setup.rank
        workers = _meet_all(setup, regrouping.num_involved)
        former, self._expert_workers = self._expert_workers, workers
        moves = plan_moves(moe, regrouping.num_ranks_before, regrouping.num_ranks, rank.tp_size)
        exchange = WeightExchange(workers, rank.pp_rank, rank.ep_rank, moves)
        is_member = setup.config.parallel.is_lockstep and rank.dp_rank < regrouping.num_ranks
        experts = _share_experts(workers, setup) if is_member else None
        workers.part()
        if self.experts is not None:
            self.experts.leave()
        if former is not None:
            former.close()
        self.experts = experts
        return exchange

    def end_regrouping(self) -> None:
        """After the exchange of a regrouping: a worker that shares experts with no others may now end."""
        if self.experts is None:
            self._leave_experts()

    def fail(self, rank: WorkerRank, error: BaseException) -> None:
        """Tell all workers that meet this one, now or later, that it has failed. They stop waiting."""
        if isinstance(error, PeerFailed):
            return  # they have heard of it, too
        cause = f"{type(error).__name__}: {error}"
        for met, address, number in (
            (self._engine_workers, rank.distributed_init, rank.worker),
            (self._expert_workers, rank.rendezvous, rank.number_among_all),
        ):
            if met is not None:
                met.fail(cause)
            elif address is not None:
                self._tell(address, number, rank, cause)
        if self._can_disconnect:  # what others wait for in Gloo ends when this worker's connections do
            self._disconnect()

    def waited_s(self) -> float:
        """Return how long this worker has waited for those of other stages."""
        return sum([link.waited_s for link in self._links])

    def leave(self) -> None:
        """Disconnect from all other workers."""
        self._disconnect()
        self._leave_experts()
        if self._engine_workers is not None:
            self._engine_workers.close()
        for meeting in self._told:
            meeting.leave()

    def _disconnect(self) -> None:
        for group in (self.ranks, self.context, self.rows, self._default, self.experts):
            if group is not None:
                group.leave()
        for link in self._links:
            link.close()

    def _tell(self, address: str, number: int, rank: WorkerRank, cause: str) -> None:
        """Tell workers that this one hasn't met."""
        with suppress(PeerFailed, ValueError):  # nobody waits there any more
            meeting = Meeting(address, number, number + 1, _TELL_S, rank.label)
            meeting.fail(cause)
            self._told.append(meeting)

    def _leave_experts(self) -> None:
        if self.experts is not None:
            self.experts.leave()
        if self._expert_workers is not None:
            self._expert_workers.close()
        self.experts = self._expert_workers = None

    def _join_engine(self, setup: WorkerSetup) -> None:
        """Connect to the workers of the same stage, and to one of each stage beside it."""
        rank = setup.rank
        if rank.distributed_init is None:
            raise InvalidConfig(
                f"{rank.world_size} workers need distributed_init, the address at which an engine's workers meet"
            )
        workers = self._engine_workers = _meet(setup, rank.distributed_init, rank.worker, rank.world_size)
        if rank.tp_size > 1:
            collectives = workers.collectives(
                f"stage {rank.pp_rank}, {rank.pcp_rank}",
                rank.tp_rank,
                rank.tp_size,
                batch_invariant=setup.config.model.batch_invariant,
            )
            self.ranks = TensorParallel(rank.tp_rank, rank.tp_size, collectives)
        if rank.context_size > 1:
            self.context = _divide_context(workers, rank)
        if rank.pcp_size > 1:
            copies = workers.collectives(f"copies {rank.pp_rank}, {rank.tp_rank}", rank.pcp_rank, rank.pcp_size)
            self.rows = DividedRows(rank.pcp_rank, rank.pcp_size, copies, setup.device)
        if rank.pp_rank > 0:
            self.source = self._note(_link_stages(workers, setup, rank.pp_rank - 1, sends=False))
        if rank.pp_rank < rank.pp_size - 1:
            self.sink = self._note(_link_stages(workers, setup, rank.pp_rank, sends=True))
        self.token_links = [self._note(_link_tokens(workers, setup, stage)) for stage in _token_takers(setup)]
        if setup.config.parallel.worker_extension_cls is not None:
            self._default = workers.default_group()
        workers.part()

    def _note(self, link: Link) -> Link:
        self._links.append(link)
        return link

    def _join_experts(self, setup: WorkerSetup) -> None:
        """Connect to the workers of this stage of all engines."""
        if setup.rank.rendezvous is None:
            raise InvalidConfig(
                f"ep_size={setup.rank.ep_size} needs rendezvous, the address at which the workers of all ranks meet"
            )
        self._expert_workers = _meet_all(setup, setup.config.parallel.num_sharing)
        self.experts = _share_experts(self._expert_workers, setup)
        self._expert_workers.part()


def _meet(setup: WorkerSetup, address: str, number: int, size: int) -> Rendezvous:
    timeout_s = setup.config.executor.init_timeout_s
    return Rendezvous(address, number, size, setup.device, timeout_s, setup.rank.label)


def _meet_all(setup: WorkerSetup, num_ranks: int) -> Rendezvous:
    """Connect to the workers of all stages of all ranks."""
    rank = setup.rank
    assert rank.rendezvous is not None, "the ranks share experts"
    return _meet(setup, rank.rendezvous, rank.number_among_all, num_ranks * rank.world_size)


def _share_experts(workers: Rendezvous, setup: WorkerSetup) -> ExpertParallel:
    """Form the group of the workers of this stage."""
    rank = setup.rank
    collectives = workers.collectives(
        f"stage {rank.pp_rank}", rank.ep_rank, rank.ep_size, batch_invariant=setup.config.model.batch_invariant
    )
    return ExpertParallel(rank.sharing_rank, rank.tp_rank, rank.tp_size, collectives, setup.device)


def _divide_context(workers: Rendezvous, rank: WorkerRank) -> ContextParallel:
    """Form the group of the workers that have other tokens' keys and values of the same heads."""
    heads, query_rank = divmod(rank.tp_rank, rank.dcp_size)
    name = f"context of stage {rank.pp_rank}, heads {heads}"
    every = workers.collectives(name, rank.context_rank, rank.context_size)
    with_other_queries = None
    if rank.dcp_size == rank.context_size:
        with_other_queries = every
    elif rank.dcp_size > 1:
        with_other_queries = workers.collectives(f"{name}, {rank.pcp_rank}", query_rank, rank.dcp_size)
    return ContextParallel(rank.context_rank, rank.context_size, every, query_rank, rank.dcp_size, with_other_queries)


def _token_takers(setup: WorkerSetup) -> list[int]:
    """Return the stages that take sampled tokens from the last one, of those that this worker has a link for."""
    rank, config = setup.rank, setup.config
    last = rank.pp_size - 1
    if not last or config.tells_tokens:
        return []
    takers = range(last) if config.workers_draft else range(1)
    return [stage for stage in takers if rank.pp_rank in (stage, last)]


def _link_tokens(workers: Rendezvous, setup: WorkerSetup, stage: int) -> Link:
    """Return this worker's end of the link by which the last stage returns sampled tokens, and drafts, to `stage`."""
    rank, config = setup.rank, setup.config
    return workers.link(
        f"tokens for stage {stage}, {rank.pcp_rank}, {rank.tp_rank}",
        sends=rank.is_last_stage,
        capacity_bytes=config.scheduler.max_num_seqs * (1 + config.max_drafts) * torch.int32.itemsize,
        num_ahead=setup.most_steps_in_flight * (1 + config.drafts_ahead),
    )


def _link_stages(workers: Rendezvous, setup: WorkerSetup, stage: int, *, sends: bool) -> Link:
    """Return this worker's end of the link from `stage` to the next one."""
    name = f"from stage {stage} to the next, {setup.rank.pcp_rank}, {setup.rank.tp_rank}"
    return workers.link(name, sends=sends, capacity_bytes=setup.hidden_bytes)
