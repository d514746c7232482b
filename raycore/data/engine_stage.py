"""The class that Ray Data's map actor runs for the engine's stage. The actor owns the engine, which ends with it."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from raycore.data.config import ProcessorConfig
from raycore.data.engine import Params, RowEngine
from raycore.data.rows import DEFAULTS, ERROR, TAKEN, Row, columns_of, failed, pooled, rows_of, succeeded
from raycore.data.tables import BadRow, Columns, TableStage
from raycore.errors import RaycoreError
from raycore.outputs import RequestOutput
from raycore.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")
PATIENCE_S = 10.0


class EngineStage(TableStage):
    """Runs rows on an engine. Several threads may call it at a time."""

    READS = (*TAKEN, "messages", "model", ERROR)
    TAKES = TAKEN

    def __init__(self, config: ProcessorConfig, **options: Any) -> None:
        """Start the engine. `options` take precedence over the configuration's. The errors are those of `LLM`."""
        self._config = config
        self._numbers = itertools.count()
        self._room = RowLimit(config.max_rows)
        self._lent = Lent(partial(RowEngine, config, **options), RowEngine.shutdown)
        with self._lent.use() as engine:
            low, high = config.ranks
            if high > low:
                threading.Thread(target=_grow, args=(engine, high), name="raycore-grow", daemon=True).start()

    def columns(self, batch: Columns, size: int) -> Columns:
        """The columns of `rows.DEFAULTS`.

        Raises:
            BadRow: a row failed, and `should_continue_on_error` is False.
            EngineDeadError: the engine has failed.
        """
        rows = rows_of(batch, size)
        batch_uuid = uuid.uuid4().hex
        results = [failed(row, row.get(ERROR) or "", batch_uuid=batch_uuid) for row in rows]
        ready = [index for index, row in enumerate(rows) if not row.get(ERROR)]  # an earlier stage may have failed
        with self._lent.use() as engine:
            for part in self._parts(ready):
                with self._room.taken(len(part)):
                    began_s = time.perf_counter()
                    outcomes = engine.run([rows[index] for index in part])
                logger.info("batch %s: %d rows in %.2f s", batch_uuid, len(part), time.perf_counter() - began_s)
                texts: dict[int, str] = {}  # by id of parameters, which rows share
                for index, outcome in zip(part, outcomes, strict=True):
                    if isinstance(outcome, tuple):
                        results[index] = self._result(engine, *outcome, batch_uuid, texts)
                    elif self._config.should_continue_on_error:
                        error = f"{type(outcome).__name__}: {outcome}"
                        results[index] = failed(rows[index], error, batch_uuid=batch_uuid)
                    else:
                        raise BadRow(index, outcome) from outcome
        return columns_of(results, list(DEFAULTS))

    def _parts(self, indices: list[int]) -> Iterator[list[int]]:
        size = self._room.size or len(indices) or 1
        return (indices[start : start + size] for start in range(0, len(indices), size))

    def _result(
        self, engine: RowEngine, params: Params, output: RequestOutput, batch_uuid: str, texts: dict[int, str]
    ) -> Row:
        if id(params) not in texts:
            texts[id(params)] = str(params)
        known = {"batch_uuid": batch_uuid, "request_id": next(self._numbers), "params": texts[id(params)]}
        if not isinstance(params, SamplingParams):
            return pooled(output, **known)
        result, stage = succeeded(output, **known), self._config.detokenize
        if stage.enabled and not params.detokenize:
            is_left = stage.has_own_actors(self._config)
            tokens = result["generated_tokens"]
            result["generated_text"] = None if is_left else engine.get_tokenizer().decode(tokens, True)
        return result

    def __del__(self) -> None:
        # Ray Data drops this object when its actor ends because the dataset has been read
        if hasattr(self, "_lent"):
            self._lent.close()


class Lent(Generic[T]):
    """Something that several threads use. It ends if a use has failed and none follows, and is made again for one.

    After an error, Ray Data's actor may live on for as long as the program keeps the error.
    """

    def __init__(self, make: Callable[[], T], end: Callable[[T], object], patience_s: float = PATIENCE_S) -> None:
        """`patience_s`: for how long nobody has to use it after a failure."""
        self._make = make
        self._end = end
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._held: T | None = None
        self._num_users = 0
        self._has_failed = False
        self._timer: threading.Timer | None = None

    @contextmanager
    def use(self) -> Generator[T]:
        """Make it if it isn't there. Raises what making it raises."""
        with self._lock:
            if self._held is None:
                self._held, self._has_failed = self._make(), False
            held = self._held
            self._num_users += 1
            if self._timer is not None:
                self._timer.cancel()
        try:
            yield held
        except BaseException:
            self._has_failed = True
            raise
        finally:
            with self._lock:
                self._num_users -= 1
                if self._num_users == 0 and self._has_failed:
                    self._timer = threading.Timer(self._patience_s, self._end_if_unused)
                    self._timer.daemon = True
                    self._timer.start()

    def close(self) -> None:
        """End it. Nobody uses it any more."""
        held, self._held = self._held, None
        if held is not None:
            self._end(held)

    def _end_if_unused(self) -> None:
        with self._lock:
            if self._num_users == 0:
                self.close()


class RowLimit:
    """Limits how many rows the engine has at a time."""

    def __init__(self, size: int | None) -> None:
        """`size`: None: no limit."""
        self.size = size
        self._changed = threading.Condition()
        self._num_taken = 0

    @contextmanager
    def taken(self, count: int) -> Generator[None]:
        """Wait until there is room for so many rows, at most `size`, and keep it while the block runs."""
        with self._changed:
            self._changed.wait_for(lambda: self.size is None or self._num_taken + count <= self.size)
            self._num_taken += count
        try:
            yield
        finally:
            with self._changed:
                self._num_taken -= count
                self._changed.notify_all()


def _grow(engine: RowEngine, num_ranks: int) -> None:
    for size in range(engine.config.parallel.data_parallel_size + 1, num_ranks + 1):
        try:
            engine.scale(size)
        except RaycoreError as error:
            logger.warning("the engine stays at %d ranks: %s", size - 1, error)
            return
