"""What operators do to a rank while requests run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from raycore.activity import RUNNING, Activity, MemoryTag
from raycore.system import time
from simulation.engine.options import CHECKPOINT
from simulation.engine.rank import WAIT_S, Group
from simulation.engine.weights import WeightHistory
from simulation.worker import model
from simulation.world.threads import world


class Operators:
    """One does what changes ranks, one thing after the other. Another one asks, and clears caches."""

    def __init__(self, group: Group, weights: WeightHistory, draw: random.Random) -> None:
        self._group, self._weights, self._draw = group, weights, draw
        self._num_checkpoints = 0

    def change_something(self) -> None:
        """Do something that changes what the rank does or computes with."""
        actions: list[Callable[[], None]] = [
            self._pause,
            self._sleep,
            self._sleep_deeply,
            self._sleep_and_update,
            self._update,
            self._reload,
            self._load_one_part,
            self._take_from_another,
            self._rename,
        ]
        action = self._draw.choice(actions)
        world().tell(action.__name__)
        action()
        world().tell(f"{action.__name__} is done")

    def ask_something(self) -> None:
        """Do something that changes no output."""
        group, draw = self._group, self._draw
        actions: list[Callable[[], object]] = [
            lambda: group.call("reset_prefix_cache", draw.random() < 0.5),
            lambda: group.call("reset_encoder_cache"),
            lambda: group.call("reset_mm_cache"),
            lambda: group.call("check_health"),
            lambda: group.call("load"),
            lambda: group.call("collective_rpc", "weights_checksum"),
        ]
        draw.choice(actions)()

    # ---- activities

    def _pause(self) -> None:
        self._group.change(RUNNING.paused(), clear_cache=self._draw.random() < 0.3)
        self._wait()
        self._group.change(RUNNING)

    def _sleep(self) -> None:
        self._wake(self._fall_asleep(1))

    def _sleep_deeply(self) -> None:
        asleep = self._fall_asleep(2)
        number = self._weights.begin(model.weights_of(CHECKPOINT))
        awake = self._wake_part(asleep, "weights")
        self._group.call("take_weights", number, "read again", False)
        self._wake(awake)

    def _sleep_and_update(self) -> None:
        awake = self._wake_part(self._fall_asleep(2), "weights", reads_weights=False)
        if self._draw.random() < 0.5:
            awake = self._wake_part(awake, "kv_cache")
        self._group.call("update_weights", "start_weight_update", (True,))
        self._bring_parts(self._new_checkpoint(), list(model.UNITS))
        self._wake(awake)

    def _fall_asleep(self, level: int) -> Activity:
        asleep = RUNNING.put_to_sleep(level)
        if self._draw.random() < 0.5:
            self._group.change(RUNNING.paused())
        self._group.change(asleep)
        self._wait()
        return asleep

    def _wake_part(self, asleep: Activity, tag: MemoryTag, *, reads_weights: bool = True) -> Activity:
        awake = asleep.woken([tag], reads_weights=reads_weights)
        self._group.change(awake)
        return awake

    def _wake(self, asleep: Activity) -> None:
        tags: list[MemoryTag] = list(asleep.asleep)
        self._draw.shuffle(tags)
        if self._draw.random() < 0.5:
            for tag in tags:
                asleep = self._wake_part(asleep, tag)
        self._group.change(RUNNING)

    # ---- weights

    def _update(self) -> None:
        """Replace weights in parts, as a trainer does. Sometimes give it up in the middle."""
        self._group.change(RUNNING.paused())
        self._group.call("update_weights", "start_weight_update", ())
        names = self._draw.sample(model.UNITS, self._draw.randrange(1, len(model.UNITS) + 1))
        self._bring_parts(self._new_checkpoint(), names, is_cancelled=self._draw.random() < 0.3)
        self._group.change(RUNNING)

    def _bring_parts(self, checkpoint: str, names: list[str], *, is_cancelled: bool = False) -> None:
        number = self._weights.begin(self._weights.replaced(checkpoint, names))
        split = self._draw.randrange(len(names) + 1)
        for some in (names[:split], names[split:]):
            self._group.call("update_weights", "update_weights", ({"checkpoint": checkpoint, "names": some},))
        method = "cancel_weight_update" if is_cancelled else "finish_weight_update"
        self._group.call("update_weights", method, ())
        self._group.call("take_weights", number, checkpoint, True, checkpoint)

    def _reload(self) -> None:
        """Read other files while steps run: between two of them."""
        checkpoint = self._new_checkpoint()
        number = self._weights.begin(model.weights_of(checkpoint))
        self._together(
            ("update_weights", "reload_from", (checkpoint,)),
            ("take_weights", number, checkpoint, self._draw.random() < 0.5),
        )

    def _load_one_part(self) -> None:
        """Call a method of the workers that changes weights without saying so."""
        name, value = self._draw.choice(model.UNITS), self._draw.getrandbits(60)
        number = self._weights.begin(self._weights.with_part(name, value))
        self._together(
            ("collective_rpc", "load_weights", None, ([[name, value]],)),
            ("take_weights", number, "one part", False),
        )

    def _together(self, *calls: tuple[Any, ...]) -> None:
        """Make calls one right after the other. Ranks that share experts make them at the same time, in a pause."""
        if self._group.shares_experts:
            self._group.change(RUNNING.paused())
        replies = [reply for call in calls for reply in self._group.begin(*call)]
        for reply in replies:
            reply.result(WAIT_S)
        if self._group.shares_experts:
            self._group.change(RUNNING)

    def _take_from_another(self) -> None:
        """Import the weights of another rank, which has the same."""
        if self._group.shares_experts:
            return
        pieces = self._group.call("update_weights", "export_weights", ())[0]
        self._group.call("update_weights", "import_weights", (pieces,))
        self._group.call("update_weights", "release_exported_weights", ())

    def _rename(self) -> None:
        self._group.call("take_weights", self._weights.begin(self._weights.now), "another name", False)

    def _new_checkpoint(self) -> str:
        self._num_checkpoints += 1
        return f"checkpoint {self._num_checkpoints}"

    def _wait(self) -> None:
        time.sleep(self._draw.expovariate(20.0))
