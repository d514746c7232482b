"""What operators do to a rank while requests run."""

from __future__ import annotations

import random
from collections.abc import Callable

from raycore.activity import RUNNING, Activity, MemoryTag
from raycore.system import time
from simulation.engine.options import CHECKPOINT
from simulation.engine.rank import WAIT_S, Rank
from simulation.engine.weights import WeightHistory
from simulation.worker import model
from simulation.world.threads import world


class Operators:
    """One does what changes a rank, one thing after the other. Another one asks, and clears caches."""

    def __init__(self, rank: Rank, weights: WeightHistory, draw: random.Random) -> None:
        self._rank, self._weights, self._draw = rank, weights, draw
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
        rank, draw = self._rank, self._draw
        actions: list[Callable[[], object]] = [
            lambda: rank.call("reset_prefix_cache", draw.random() < 0.5),
            lambda: rank.call("reset_encoder_cache"),
            lambda: rank.call("reset_mm_cache"),
            lambda: rank.call("check_health"),
            lambda: rank.call("load"),
            lambda: rank.call("collective_rpc", "weights_checksum"),
        ]
        draw.choice(actions)()

    # ---- activities

    def _pause(self) -> None:
        self._rank.change(RUNNING.paused(), clear_cache=self._draw.random() < 0.3)
        self._wait()
        self._rank.change(RUNNING)

    def _sleep(self) -> None:
        self._wake(self._fall_asleep(1))

    def _sleep_deeply(self) -> None:
        asleep = self._fall_asleep(2)
        number = self._weights.begin(model.weights_of(CHECKPOINT))
        awake = self._wake_part(asleep, "weights")
        self._rank.call("take_weights", number, "read again", False)
        self._wake(awake)

    def _sleep_and_update(self) -> None:
        awake = self._wake_part(self._fall_asleep(2), "weights", reads_weights=False)
        if self._draw.random() < 0.5:
            awake = self._wake_part(awake, "kv_cache")
        self._rank.call("update_weights", "start_weight_update", (True,))
        self._bring_parts(self._new_checkpoint(), list(model.UNITS))
        self._wake(awake)

    def _fall_asleep(self, level: int) -> Activity:
        asleep = RUNNING.put_to_sleep(level)
        if self._draw.random() < 0.5:
            self._rank.change(RUNNING.paused())
        self._rank.change(asleep)
        self._wait()
        return asleep

    def _wake_part(self, asleep: Activity, tag: MemoryTag, *, reads_weights: bool = True) -> Activity:
        awake = asleep.woken([tag], reads_weights=reads_weights)
        self._rank.change(awake)
        return awake

    def _wake(self, asleep: Activity) -> None:
        tags: list[MemoryTag] = list(asleep.asleep)
        self._draw.shuffle(tags)
        if self._draw.random() < 0.5:
            for tag in tags:
                asleep = self._wake_part(asleep, tag)
        self._rank.change(RUNNING)

    # ---- weights

    def _update(self) -> None:
        """Replace weights in parts, as a trainer does. Sometimes give it up in the middle."""
        self._rank.change(RUNNING.paused())
        self._rank.call("update_weights", "start_weight_update", ())
        names = self._draw.sample(model.UNITS, self._draw.randrange(1, len(model.UNITS) + 1))
        self._bring_parts(self._new_checkpoint(), names, is_cancelled=self._draw.random() < 0.3)
        self._rank.change(RUNNING)

    def _bring_parts(self, checkpoint: str, names: list[str], *, is_cancelled: bool = False) -> None:
        number = self._weights.begin(self._weights.replaced(checkpoint, names))
        split = self._draw.randrange(len(names) + 1)
        for some in (names[:split], names[split:]):
            self._rank.call("update_weights", "update_weights", ({"checkpoint": checkpoint, "names": some},))
        method = "cancel_weight_update" if is_cancelled else "finish_weight_update"
        self._rank.call("update_weights", method, ())
        self._rank.call("take_weights", number, checkpoint, True, checkpoint)

    def _reload(self) -> None:
        """Read other files while steps run: between two of them."""
        checkpoint = self._new_checkpoint()
        number = self._weights.begin(model.weights_of(checkpoint))
        read = self._rank.begin("update_weights", "reload_from", (checkpoint,))
        taken = self._rank.begin("take_weights", number, checkpoint, self._draw.random() < 0.5)
        read.result(WAIT_S)
        taken.result(WAIT_S)

    def _load_one_part(self) -> None:
        """Call a method of the workers that changes weights without saying so."""
        name, value = self._draw.choice(model.UNITS), self._draw.getrandbits(60)
        number = self._weights.begin(self._weights.with_part(name, value))
        loaded = self._rank.begin("collective_rpc", "load_weights", None, ([[name, value]],))
        taken = self._rank.begin("take_weights", number, "one part", False)
        loaded.result(WAIT_S)
        taken.result(WAIT_S)

    def _take_from_another(self) -> None:
        """Import the weights of another rank, which has the same."""
        pieces = self._rank.call("update_weights", "export_weights", ())
        self._rank.call("update_weights", "import_weights", (pieces,))
        self._rank.call("update_weights", "release_exported_weights", ())

    def _rename(self) -> None:
        self._rank.call("take_weights", self._weights.begin(self._weights.now), "another name", False)

    def _new_checkpoint(self) -> str:
        self._num_checkpoints += 1
        return f"checkpoint {self._num_checkpoints}"

    def _wait(self) -> None:
        time.sleep(self._draw.expovariate(20.0))
