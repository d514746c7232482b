"""vLLM's wrappers of Ray's metrics, for programs that record their own, and its class that exports an engine's."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from copy import copy
from typing import Any, ClassVar

from typing_extensions import Self

from raycore.errors import InvalidConfig
from raycore.metrics.ray_export import new_metric
from raycore.metrics.stat_loggers import StatLoggerBase


class RayPrometheusMetric:
    """A metric of Ray's with the methods of `prometheus_client`. Ray allows letters, digits and `_` in names."""

    kind: ClassVar[str]

    def __init__(
        self, name: str, documentation: str | None = "", labelnames: Sequence[str] | None = None, **options: Any
    ) -> None:
        self._labels = tuple(labelnames or ())
        self._tags: dict[str, str] | None = None if self._labels else {}
        plain = re.sub(r"[^a-zA-Z0-9_]", "_", name)
        self.metric = new_metric(self.kind, plain, documentation or "", self._labels, **options)

    def labels(self, *values: object, **named: object) -> Self:
        """The same metric with these values of its labels, in order or by name."""
        given = dict(zip(self._labels, values, strict=False)) | named
        if len(values) + len(named) != len(self._labels) or set(given) != set(self._labels):
            raise InvalidConfig(f"labels(): give a value for each of {', '.join(self._labels) or 'no labels'}")
        labelled = copy(self)
        labelled._tags = {name: str(value) for name, value in given.items()}
        return labelled

    @property
    def tags(self) -> dict[str, str]:
        """The values of the labels. Raises InvalidConfig if there are none."""
        if self._tags is None:
            raise InvalidConfig(f"call labels() before: the metric has the labels {', '.join(self._labels)}")
        return self._tags


class RayGaugeWrapper(RayPrometheusMetric):
    """A number that grows and shrinks."""

    kind = "Gauge"

    def __init__(
        self,
        name: str,
        documentation: str | None = "",
        labelnames: Sequence[str] | None = None,
        multiprocess_mode: str | None = "",
    ) -> None:
        """`multiprocess_mode` has no effect: Ray tells processes apart."""
        super().__init__(name, documentation, labelnames)

    def set(self, value: float) -> None:
        """Set the number."""
        self.metric.set(value, tags=self.tags)

    def set_to_current_time(self) -> None:
        """Set it to the seconds since 1970."""
        self.set(time.time())


class RayCounterWrapper(RayPrometheusMetric):
    """A number that only grows."""

    kind = "Counter"

    def inc(self, value: float = 1.0) -> None:
        """Add to it. Ray refuses 0, which changes nothing."""
        if value:
            self.metric.inc(value, tags=self.tags)


class RayHistogramWrapper(RayPrometheusMetric):
    """Counts of values by bucket."""

    kind = "Histogram"

    def __init__(
        self,
        name: str,
        documentation: str | None = "",
        labelnames: Sequence[str] | None = None,
        buckets: Sequence[float] | None = None,
    ) -> None:
        """`buckets`: their upper bounds. Ray needs some, and they are above 0."""
        super().__init__(name, documentation, labelnames, boundaries=list(buckets or ()))

    def observe(self, value: float) -> None:
        """Add a value."""
        self.metric.observe(value, tags=self.tags)


class RayPrometheusStatLogger(StatLoggerBase):
    """Does nothing: raycore exports an engine's metrics through Ray anyway, as `ray_raycore_…`."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

    def record(
        self, scheduler_stats: object, iteration_stats: object, mm_cache_stats: object = None, engine_idx: int = 0
    ) -> None:
        """Nothing."""

    def log_engine_initialized(self) -> None:
        """Nothing."""
