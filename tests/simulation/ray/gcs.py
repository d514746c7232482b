"""Ray's control store (GCS): knows the nodes, actors and groups, places them, and tells others what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from simulation.ray import errors
from simulation.ray.errors import Error
from simulation.ray.groups import SHARE_LEAKED, Group
from simulation.ray.messages import Boundary, Message
from simulation.ray.nodes import Node
from simulation.ray.objects import here
from simulation.world.threads import world

if TYPE_CHECKING:
    from simulation.ray.actors import Actor, Incarnation
    from simulation.ray.calls import View
    from simulation.ray.cluster import Cluster
    from simulation.ray.workers import Job, Worker

T = TypeVar("T")

LONGEST_OUTAGE_S = 60.0
"""Without a control store for this long, Ray's processes end."""
_ENDED_BY_OUTAGE = 1


class Gcs:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.is_up = True
        self.actors: dict[str, Actor] = {}
        self.groups: dict[str, Group] = {}
        self.ended_workers: dict[str, Worker] = {}
        self.process = cluster.world.process("gcs")
        self._held: list[Callable[[], object]] = []
        """What happens when it is back."""
        self._pending: list[Actor] = []
        self._looks = False
        self.num_outages = 0

    # ---- outages

    def stall(self, seconds: float) -> None:
        """Answer nothing for a while. Connections are still taken."""
        self._go_down(seconds, "stalls")
        self.cluster.world.stop(self.process)

    def restart(self, seconds: float) -> None:
        """End, and be back after a while. No connections are taken meanwhile."""
        self._go_down(seconds, "ends, and is restarted")
        self.cluster.world.kill(self.process)

    def resume(self) -> None:
        """Go on now, after a stall."""
        self._come_back(self.num_outages, is_too_late=False)

    def _go_down(self, seconds: float, what: str) -> None:
        world_ = self.cluster.world
        world_.tell(f"{what} for {seconds:g} s", "gcs")
        self.is_up = False
        self.num_outages += 1
        outage = self.num_outages
        world_.call_later(min(seconds, LONGEST_OUTAGE_S), partial(self._come_back, outage, seconds > LONGEST_OUTAGE_S))

    def _come_back(self, outage: int, is_too_late: bool) -> None:
        if outage != self.num_outages or self.is_up:
            return
        world_ = self.cluster.world
        if is_too_late:
            world_.tell("is away for too long: Ray's processes end", "gcs")
            for worker in list(self.cluster.workers.values()):
                world_.kill(worker.process, _ENDED_BY_OUTAGE)
            return
        if self.process.has_ended:
            self.process = world_.process("gcs")
        else:
            world_.go_on(self.process)
        world_.tell("is back", "gcs")
        self.is_up = True
        held, self._held = self._held, []
        for happen in held:
            self.later(self.cluster.delays.network(), happen)

    def when_up(self, happen: Callable[[], object]) -> None:
        if self.is_up:
            happen()
        else:
            self._held.append(happen)

    def later(self, delay_s: float, happen: Callable[[], object]) -> None:
        """Have something happen after a delay, and not while this store is away."""
        self.cluster.world.call_later(delay_s, lambda: self.when_up(happen))

    # ---- requests

    def ask(self, what: str, answer: Callable[[], T]) -> T:
        """Send a request, and wait for the answer. Raises what `answer` raises."""
        here_ = world()
        thread, cluster, worker = here_.current, self.cluster, here()
        assert thread is not None
        message = Message("request", what, 0, thread.process)
        cluster.pass_boundary(Boundary.BEFORE, message)
        outcome: list[tuple[Any, BaseException | None]] = []

        def arrive() -> None:
            cluster.pass_boundary(Boundary.RECEIVED, message)
            found: tuple[Any, BaseException | None]
            try:
                found = answer(), None
            except Exception as error:
                found = None, error
            cluster.pass_boundary(Boundary.ANSWERED, message)
            here_.call_later(cluster.delays.network(), partial(hear, found))

        def hear(found: tuple[Any, BaseException | None]) -> None:
            cluster.pass_boundary(Boundary.HEARD, message)
            outcome.append(found)
            here_.unpark(thread)

        cluster.send(worker, lambda: self.when_up(arrive))
        cluster.pass_boundary(Boundary.SENT, message)
        with here_.signals_deferred():
            while not outcome:
                here_.park(f"the control store's answer: {what}")
        if (raised := cluster.raised_at(Boundary.HEARD, message)) is not None:
            raise raised
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    # ---- actors

    def holder(self, name: str, namespace: str) -> Actor | None:
        """The actor that has a name. Those that have ended keep theirs for a short time."""
        for actor in self.actors.values():
            if actor.name == name and actor.namespace == namespace and actor.state != "DEAD":
                return actor
        return None

    def register(self, actor: Actor) -> None:
        self.actors[actor.id] = actor
        if actor.is_dead:  # it was killed before
            self.publish(actor)
            return
        if actor.owner.is_known_dead and not actor.is_detached:
            self.end(actor, errors.died(actor, _owner_text(actor.owner)))
            return
        self._pending.append(actor)
        self.look()

    def subscribe(self, view: View) -> None:
        """Have a process told of an actor's state, now and later."""
        self.later(self.cluster.delays.network(), lambda: self._add_view(view))

    def _add_view(self, view: View) -> None:
        actor = view.actor
        actor.views.append(view)
        if actor.id in self.actors:
            self._tell(view, actor, self.cluster.delays.network())

    def publish(self, actor: Actor) -> None:
        actor.version += 1
        for view in actor.views:
            self._tell(view, actor, self.cluster.delays.notice())

    def _tell(self, view: View, actor: Actor, delay_s: float) -> None:
        incarnation = actor.incarnation if actor.state == "ALIVE" else None
        is_restarting = actor.state == "RESTARTING"
        self.later(delay_s, partial(view.update, actor.version, incarnation, actor.death, is_restarting))

    def look(self) -> None:
        """Place what waits for a place, soon."""
        if not self._looks:
            self._looks = True
            self.later(self.cluster.delays.network(), self._look)

    def _look(self) -> None:
        self._looks = False
        for group in self.groups.values():
            if group.state == "PENDING" or (group.state == "RESCHEDULING" and None in group.nodes):
                self._place_group(group)
        pending, self._pending = self._pending, []
        for actor in pending:
            if not actor.is_dead and not self._place_actor(actor):
                self._pending.append(actor)

    def _place_actor(self, actor: Actor) -> bool:
        """Send an actor to a node, if there is one for it. Returns whether its wait is over."""
        strategy, nodes = actor.strategy, self.cluster.nodes
        pool: Any = None
        node: Node | None = None
        if hasattr(strategy, "placement_group"):
            group = self.groups.get(strategy.placement_group.id.hex())
            index = strategy.placement_group_bundle_index
            # it waits for ever for a group that had been removed when it was registered
            if group is None or group.state != "CREATED" or not group.pools[index].fits(actor.amounts):
                return False
            node, pool = group.nodes[index], group.pools[index]
        else:
            wanted = getattr(strategy, "node_id", None)
            named = next((each for each in nodes if each.id == wanted and each.takes_actors), None)
            if wanted is not None and named is None and not strategy.soft:
                self.end(actor, errors.unschedulable(wanted))
                return True
            others = [each for each in nodes if each.takes_actors and each.fits(actor.amounts)]
            if named is not None:
                node = named if named.fits(actor.amounts) else None
            elif others:
                node = others[self.cluster.draws.randrange(len(others))]
            pool = node
        if node is None:
            return False
        pool.take(actor.amounts)
        actor.node, actor.pool = node, pool
        node.changed(released=False)
        self.later(self.cluster.delays.process_start(), partial(self._start, actor, node))
        return True

    def _start(self, actor: Actor, node: Node) -> None:
        """The node's raylet has started a process."""
        from simulation.ray.actors import Incarnation

        if node.is_lost or node.raylet.has_ended or actor.is_dead or actor.node is not node:
            return  # of a crashed node nobody hears, until it is declared dead
        if not node.answers:
            self.later(node.stands_still_until_s - self.cluster.world.now_s, partial(self._start, actor, node))
            return
        actor.incarnation = Incarnation(actor, node)
        self.cluster.world.tell(f"starts on {node}", actor.incarnation.process)

    def created(self, incarnation: Incarnation) -> None:
        actor = incarnation.actor
        if not actor.is_dead and actor.incarnation is incarnation and not incarnation.process.has_ended:
            actor.state = "ALIVE"
            self.publish(actor)

    def kill(self, actor: Actor, *, no_restart: bool) -> None:
        if no_restart:
            self.end(actor, errors.died(actor, errors.KILLED))
        elif actor.incarnation is not None and actor.state == "ALIVE":
            actor.incarnation.kill()

    def end(self, actor: Actor, death: Error, *, gracefully: bool = False, is_orphan: bool = False) -> None:
        """An actor ends for good. Its process is asked to end."""
        if actor.is_dead:
            return
        actor.death, actor.state = death, "DEAD"
        self.cluster.world.tell("is dead to Ray", actor)
        incarnation = actor.incarnation
        # nobody asks a process that Ray takes for dead, as some may be that have lost their raylet
        if incarnation is None or incarnation.process.has_ended or incarnation.worker.is_known_dead:
            actor.release()
        elif gracefully:
            incarnation.leave()
        else:
            incarnation.kill(is_orphan=is_orphan)
        self.publish(actor)

    def _lose(self, actor: Actor, death: Error) -> None:
        """An actor's process has ended: it is started again, or dead."""
        if actor.is_dead:
            actor.release()
            return
        actor.release()
        if actor.restarts_left <= 0:
            self.end(actor, death)
            return
        actor.restarts_left -= 1
        actor.state = "RESTARTING"
        self.cluster.world.tell("is restarted", actor)
        self.publish(actor)
        self._pending.append(actor)
        self.look()

    # ---- ends

    def worker_ended(self, worker: Worker, death: Error | None = None) -> None:
        """The end of a process has become known. `death`: why its actor is dead. None: by the process's end."""
        self.cluster.workers.pop(worker.process.pid, None)
        self.ended_workers[worker.id] = worker
        if worker.is_known_dead:
            return
        worker.is_known_dead = True
        if worker.incarnation is not None:
            actor = worker.incarnation.actor
            if actor.incarnation is worker.incarnation:
                self._lose(actor, death or self._why(worker, actor))
        else:
            worker.job.has_ended = True
        for owned in worker.owned:
            if not owned.is_detached:
                self.end(owned, errors.died(owned, _owner_text(worker)), is_orphan=True)
        if worker.job.has_ended:
            self._end_job(worker.job)
        self._remove_groups_of(worker)

    def _why(self, worker: Worker, actor: Actor) -> Error:
        if worker.process.exit_code == self.cluster.OUT_OF_MEMORY:
            return errors.out_of_memory(worker.node.id)
        return errors.died(actor, errors.PROCESS_DIED)

    def _end_job(self, job: Job) -> None:
        for actor in list(self.actors.values()):
            if actor.job is job and not actor.is_detached:
                self.end(actor, errors.died(actor, errors.JOB_ENDED), is_orphan=True)

    def _remove_groups_of(self, worker: Worker) -> None:
        for key, group in list(self.groups.items()):
            if group.creator.is_known_dead and group.creator.job.has_ended:
                self.remove_group(key)

    def node_died(self, node: Node) -> None:
        was_drained = node.drain_deadline_s is not None
        text = node.death_text()
        for worker in [worker for worker in self.cluster.workers.values() if worker.node is node]:
            actor = worker.incarnation.actor if worker.incarnation is not None else None
            death = None if actor is None else errors.died(actor, text, preempted=was_drained)
            self.worker_ended(worker, death)
        for group in self.groups.values():
            lost = [index for index, each in enumerate(group.nodes) if each is node]
            if lost and group.state != "REMOVED":
                group.state = "RESCHEDULING" if group.state in ("CREATED", "RESCHEDULING") else "PENDING"
                for index in lost:
                    group.give_back(index)
        for actor in list(self.actors.values()):  # those that were sent there, and haven't begun
            has_none = actor.incarnation is None or actor.incarnation.process.has_ended
            if actor.node is node and has_none and not actor.is_dead and actor not in self._pending:
                actor.release()
                self._pending.append(actor)
        self.look()

    # ---- groups

    def add_group(self, group: Group) -> None:
        self.groups[group.id] = group
        self.look()

    def _place_group(self, group: Group) -> None:
        nodes = [node for node in self.cluster.nodes if node.takes_actors]
        self.cluster.draws.shuffle(nodes)
        found = group.place(nodes)
        if found is None:
            return
        group.take(found)
        was_created = group.state == "RESCHEDULING"
        if not was_created:
            group.state = "PREPARED"
        steps = self.cluster.delays.group_step() + (0.0 if was_created else self.cluster.delays.group_step())
        self.later(steps, partial(self._finish_group, group))

    def _finish_group(self, group: Group) -> None:
        if group.state == "REMOVED" or None in group.nodes:
            return
        if any(node is not None and (node.is_lost or node.raylet.has_ended) for node in group.nodes):
            return  # the node doesn't answer: Ray goes on when it takes the node for dead
        still_s = max(node.stands_still_until_s for node in group.nodes if node is not None)
        if still_s > self.cluster.world.now_s:
            self.later(still_s - self.cluster.world.now_s, partial(self._finish_group, group))
            return
        group.state = "CREATED"
        self.cluster.world.tell(f"is created on {', '.join(sorted({str(node) for node in group.nodes}))}", group)
        group.show()
        self.look()

    def remove_group(self, key: str) -> None:
        group = self.groups.get(key)
        if group is None or group.state == "REMOVED":
            return
        was_under_way = group.state in ("PENDING", "PREPARED")
        group.state = "REMOVED"
        self.cluster.world.tell("is removed", group)
        for actor in list(self.actors.values()):
            of = getattr(actor.strategy, "placement_group", None)
            if of is not None and of.id.hex() == key:
                is_there = actor.state == "ALIVE"
                self.end(actor, errors.died(actor, errors.GROUP_REMOVED) if is_there else errors.without_group())
        if was_under_way and self.cluster.draws.random() < SHARE_LEAKED:
            return
        for index in range(len(group.nodes)):
            group.give_back(index)


def _owner_text(owner: Worker) -> str:
    detail = "Owner's node has crashed." if owner.node.is_lost else "Worker unexpectedly exits. End of file."
    return errors.owner_died(owner.id, owner.node.ip, detail)
