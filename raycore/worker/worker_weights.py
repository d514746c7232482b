"""A worker's weights: where they come from, and where they are while the worker sleeps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from raycore.activity import MemoryTag
from raycore.errors import InvalidConfig
from raycore.messages import Computation
from raycore.parts.weights.worker.in_place import weight_tensors
from raycore.parts.weights.worker.reads import LEAST_BYTES, bytes_of_step, read_rate
from raycore.rpc.start_phases import phase
from raycore.worker.part import WorkerPart, called_by_name
from raycore.worker.weight_store import describe_stored, read_weights, save_weights, unread_weights

logger = logging.getLogger(__name__)


class WorkerWeights(WorkerPart):
    """Loads, gives up and saves the weights."""

    _stored = ""
    """As in `Computation.weights`."""

    @called_by_name
    @phase("load weights")
    def load_model(self) -> None:
        """Read this worker's share of its stage's weights, or generate random weights, and build the decoder.

        Raises:
            InvalidCheckpoint: a file or a tensor is missing or damaged.
        """
        core, setup = self.core, self.core.setup
        if setup.rank.pp_size > 1:
            logger.info("this stage has layers %d to %d", setup.stage.layers[0], setup.stage.layers[-1])
        core.model.build(setup, read_weights(setup, setup.share, self._note_progress))
        self._stored = describe_stored(setup)
        if self._stored:
            logger.info("weights of the GGUF file: %s", self._stored)

    def _note_progress(self, num_read: int, num_tensors: int) -> None:
        self.core.load_progress = num_read / num_tensors

    @called_by_name
    def reload_weights(self) -> None:
        """Read the checkpoint's files again, after another program has changed them.

        For `collective_rpc`, between `wake_up(tags=["weights"])` and `wake_up(tags=["kv_cache"])`.

        Raises:
            InvalidConfig: the KV cache is awake, and with it what uses the weights.
            InvalidCheckpoint: as in `load_model()`.
        """
        if self.core.has_cache:
            raise InvalidConfig(
                "reload_weights() is for a KV cache that sleeps: call sleep(level=2) and wake_up(tags=['weights']) "
                "before it, and wake_up(tags=['kv_cache']) after it"
            )
        self.core.model.sleep(2, self.core.setup.device)
        self.load_model()

    def fall_asleep(self, level: int, tags: Sequence[MemoryTag]) -> None:
        """Give up weights if they are meant. On a CPU, level 1 leaves them where they are."""
        if "weights" in tags:
            assert not self.core.has_cache, "the runner uses the weights"
            self.core.model.sleep(level, self.core.setup.device)

    def wake(self, tags: Sequence[MemoryTag], reads_weights: bool) -> None:
        """Get weights back that were given up.

        Raises:
            InvalidCheckpoint: as in `load_model()`, after a sleep of level 2.
        """
        core = self.core
        if "weights" not in tags or core.model.wake_up():
            return
        if reads_weights:
            self.load_model()
        else:
            core.model.build(core.setup, unread_weights(core.setup))
        core.lacks_weights = not reads_weights

    def complete(self, computation: Computation) -> Computation:
        """Return also in which form the weights are and, with native kernels on a CPU, how fast they are read."""
        core = self.core
        computation = msgspec.structs.replace(computation, weights=self._stored)
        if not core.model.is_built or not computation.backend.startswith("native"):
            return computation
        step_bytes = bytes_of_step(core.model.network, core.config.model.spec)
        if step_bytes < LEAST_BYTES:
            return computation
        torch.set_num_threads(core.setup.max_threads)
        rate = read_rate(weight_tensors(core.model.network).values())
        return msgspec.structs.replace(computation, step_bytes=step_bytes if rate else 0, memory_rate=rate)

    @property
    @called_by_name
    def num_weight_changes(self) -> int:
        """A number that grows whenever weights change, and sometimes more often."""
        return self.core.model.num_changes

    @called_by_name
    def lacks_weights(self) -> bool:
        """Whether the weights have no numbers: since a `wake_up()` that reads none, until a whole update is over."""
        return self.core.lacks_weights

    @called_by_name
    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> list[str]:
        """Write this worker's share of the weights to the directory `path`, for `load_format="sharded_state"`.

        Args:
            pattern: the files' names. None: `model-rank-{rank}-part-{part}.safetensors`, or with stages
                `model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors`.
            max_size: the size at which another file is begun, in bytes. None: one file.

        Returns: the paths of the files with weights.

        Raises:
            InvalidConfig: the pattern can't be used, or the checkpoint's weights are quantized.
            OSError: a file can't be written.
        """
        if self.core.rank.pcp_rank > 0:
            return []  # another worker has the same share
        return [str(each) for each in save_weights(self.core.setup, Path(path), pattern, max_size)]
