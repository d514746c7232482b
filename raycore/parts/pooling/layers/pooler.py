"""Pools the final hidden states of a step into the results of its requests.

A request's result is complete in the step that computes its prompt's last token. Until then, a chunk of the prompt adds
to what is kept for its slot: a sum, the first token's state, or results of tokens. All of it is in float32.

Shape suffixes: T tokens of a step, R those that are the last ones of their prompts, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.messages import Pooled, StepPlan
from raycore.parts.pooling.layers.heads import Heads, normalized
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.pooling_params import PoolingParams, PoolingTask
from raycore.step.batch import Ints, StepInputs
from raycore.step.copies import Download, to_device


class Recipe(NamedTuple):
    """What requests have in common whose rows are computed together."""

    task: PoolingTask
    use_activation: bool
    dimensions: int | None
    columns: tuple[int, ...] | None
    """Which columns of the result are kept. None: all."""


@dataclass(slots=True)
class _Wanted:
    """What a running request wants, and what its earlier chunks have given."""

    recipe: Recipe
    needs_all: bool
    """Whether it takes other tokens' hidden states than the last one's."""
    is_per_token: bool
    step_tag_id: int | None
    total_D: Tensor | None = None
    """The sum of the hidden states so far, or the first one."""
    num_added: int = 0
    parts: list[Download] = field(default_factory=list[Download])
    """The results of tokens so far."""


@dataclass(slots=True)
class PooledDownload:
    """A step's results on their way to the host."""

    together: list[tuple[list[int], Download]] = field(default_factory=list[tuple[list[int], Download]])
    """(indexes in `StepInputs.slots`, float32[len(indexes), Y]: a result each)."""
    per_token: list[tuple[int, list[Download]]] = field(default_factory=list[tuple[int, list[Download]]])
    """(index in `StepInputs.slots`, float32[n, Y] of each chunk of the prompt)."""

    def entries(self) -> list[tuple[int, Pooled]]:
        """Wait for the results. Returns `StepResult.pooled`."""
        found: list[tuple[int, Pooled]] = []
        for indexes, download in self.together:
            (rows,) = download.arrays()
            found += [(index, _pooled(row)) for index, row in zip(indexes, rows, strict=True)]
        for index, downloads in self.per_token:
            parts = [part for download in downloads for part in download.arrays()]
            found.append((index, _pooled(parts[0] if len(parts) == 1 else np.concatenate(parts))))
        return sorted(found, key=lambda entry: entry[0])


class Pooler:
    """Makes the results of running requests. Workers of the last stage that don't report have one without heads: they
    only have to know which rows a step computes."""

    def __init__(
        self, spec: PoolingSpec, heads: Heads | None, *, one_by_one: bool = False, computes_whole_prompts: bool = False
    ) -> None:
        """
        Args:
            heads: None on a worker that doesn't report results.
            one_by_one: compute each row by itself, so that its bits don't depend on other rows.
            computes_whole_prompts: whether a prompt's tokens are all computed in one step, so that the first one's
                hidden state is there in the step that completes the result.
        """
        self._spec = spec
        self.takes_first_tokens = computes_whole_prompts and spec.sequence == "CLS"
        """Whether one result is made of the first token of a prompt, in place of the last one, and of no others."""
        self._heads = heads
        self._one_by_one = one_by_one
        self._wanted: dict[int, _Wanted] = {}
        """By slot."""
        self._with_all: set[int] = set()
        """The slots of requests that take all their tokens' hidden states."""

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's freed slots and new requests, in this order."""
        for slot in plan.freed_slots:
            self._wanted.pop(slot, None)
            self._with_all.discard(slot)
        for new in plan.new_requests:
            wanted = self._want(new.pooling or PoolingParams())
            assert not (wanted.needs_all and new.num_computed_tokens), "cached tokens have no hidden states"
            self._wanted[new.slot] = wanted
            if wanted.needs_all:
                self._with_all.add(new.slot)

    def wants_all_rows(self, slots: Ints) -> bool:
        """Whether a request among `slots` takes the hidden states of all its tokens."""
        return bool(self._with_all) and not self._with_all.isdisjoint(slots.tolist())

    def start(
        self, step: StepInputs, token_ids: NDArray[np.int32], hidden_TD: Tensor | None, hidden_RD: Tensor
    ) -> PooledDownload | None:
        """Start to compute a step's results, and to bring them to the host. None: this worker doesn't report them.

        Args:
            token_ids: by slot and position, the tokens of the prompts.
            hidden_TD: the final hidden states of all tokens. None: no request takes them.
            hidden_RD: those of the last tokens of prompts, or the first ones, in the order of `step.sampled`.
        """
        if self._heads is None:
            return None
        download = PooledDownload()
        rows_of: dict[Recipe, tuple[list[int], list[Tensor]]] = {}
        if hidden_TD is not None:
            self._add_chunks(step, token_ids, hidden_TD)
        last_rows: dict[Recipe, tuple[list[int], list[int]]] = {}
        for row, index in enumerate(step.sampled.tolist()):
            wanted = self._wanted[int(step.slots[index])]
            if wanted.is_per_token:
                download.per_token.append((index, wanted.parts))
                wanted.parts = []
            elif wanted.needs_all:
                indexes, rows = rows_of.setdefault(wanted.recipe, ([], []))
                indexes.append(index)
                rows.append(self._complete(wanted))
            else:
                own = last_rows.setdefault(wanted.recipe, ([], []))
                own[0].append(index)
                own[1].append(row)
        for recipe, (indexes, rows) in rows_of.items():
            download.together.append((indexes, Download([self._finish(torch.stack(rows), recipe)])))
        for recipe, (indexes, numbers) in last_rows.items():
            is_whole = len(numbers) == len(hidden_RD)
            own_RD = hidden_RD if is_whole else _rows(hidden_RD, numbers)
            download.together.append((indexes, Download([self._finish(own_RD, recipe)])))
        return download

    def _want(self, params: PoolingParams) -> _Wanted:
        spec, task = self._spec, params.task or self._spec.tasks[0]
        use_activation = spec.use_activation if params.use_activation is None else params.use_activation
        columns, tokens = params.returned_token_ids, spec.class_tokens
        if columns is not None and tokens is not None:
            columns = [tokens.index(token) for token in columns]
        return _Wanted(
            Recipe(task, use_activation, params.dimensions, None if columns is None else tuple(columns)),
            spec.is_per_token(task) or (spec.needs_all_tokens(task) and not self.takes_first_tokens),
            spec.is_per_token(task),
            params.step_tag_id,
        )

    def _add_chunks(self, step: StepInputs, token_ids: NDArray[np.int32], hidden_TD: Tensor) -> None:
        """Add the tokens of a step to what is kept for their slots."""
        first_rows = step.first_rows.tolist()
        for index, slot in enumerate(step.slots.tolist()):
            wanted = self._wanted[slot]
            if not wanted.needs_all:
                continue
            start, count = int(step.starts[index]), int(step.counts[index])
            chunk_TD = hidden_TD[first_rows[index] : first_rows[index] + count]
            if wanted.is_per_token:
                if wanted.step_tag_id is not None:
                    is_tag = token_ids[slot, start : start + count] == wanted.step_tag_id
                    chunk_TD = _rows(chunk_TD, np.flatnonzero(is_tag))
                late = self._spec.late
                if late is not None and token_ids[slot, 1] != late.query_marker:
                    is_skipped = np.isin(token_ids[slot, start : start + count], late.skipped)
                    chunk_TD = _rows(chunk_TD, np.flatnonzero(~is_skipped))
                wanted.parts.append(Download([self._finish(chunk_TD, wanted.recipe)]))
            elif self._spec.sequence == "CLS":
                if start == 0:
                    wanted.total_D = chunk_TD[0].float().clone()
            else:
                total_D = chunk_TD.float().sum(0)
                wanted.total_D = total_D if wanted.total_D is None else wanted.total_D + total_D
                wanted.num_added += count

    def _complete(self, wanted: _Wanted) -> Tensor:
        """Return the pooled hidden state [D] of a request whose tokens have all been added."""
        assert wanted.total_D is not None, "the prompt's first token comes first"
        return wanted.total_D / wanted.num_added if self._spec.sequence == "MEAN" else wanted.total_D

    def _finish(self, rows: Tensor, recipe: Recipe) -> Tensor:
        """Return the results of pooled hidden states [N, D], as float32[N, Y]."""
        if self._one_by_one and len(rows) > 1:
            return torch.cat([self._finish(rows[row : row + 1], recipe) for row in range(len(rows))])
        assert self._heads is not None
        spec, task = self._spec, recipe.task
        rows = rows.float()
        is_embedding = task in ("embed", "token_embed")
        layers = self._heads.embed if is_embedding else self._heads.classify
        for layer in self._heads.token_classify if task == "token_classify" else layers:
            rows = layer(rows)
        if not is_embedding:
            rows = _calibrated(rows, spec)
        if recipe.columns is not None:
            rows = _rows(rows.t(), recipe.columns).t()
        if recipe.dimensions is not None:
            rows = rows[:, : recipe.dimensions]
        if recipe.use_activation:
            rows = normalized(rows, spec.activation(task))
        return rows.contiguous()


def _calibrated(logits: Tensor, spec: PoolingSpec) -> Tensor:
    if spec.logit_mean is not None:
        logits = logits - spec.logit_mean
    return logits if spec.logit_sigma is None else logits / spec.logit_sigma


def _rows(matrix: Tensor, numbers: Sequence[int] | NDArray[np.int64]) -> Tensor:
    """Return rows of a matrix, without waiting for the device."""
    return matrix.index_select(0, to_device(np.asarray(numbers, np.int64), matrix.device))


def _pooled(values: NDArray[np.generic]) -> Pooled:
    return Pooled(values.tobytes(), list(values.shape))
