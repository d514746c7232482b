"""The worker's side of images: an engine that only encodes them ends its steps without sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from raycore.config import EngineConfig
from raycore.runner.heads import Head
from raycore.runner.launched_step import LaunchedStep
from raycore.step.batch import StepInputs
from raycore.step.copies import Download
from raycore.step.device_batch import DeviceBatch, StepTensors
from raycore.worker.part import WorkerPart


class EncodesOnly(WorkerPart):
    """Ends steps of an engine whose role is `ec_producer`."""

    option: ClassVar[str] = "ec_role='ec_producer'"

    @classmethod
    def is_needed(cls, config: EngineConfig) -> bool:
        return config.model.spec.encodes_only

    def heads(self, batch: DeviceBatch) -> Sequence[Head]:
        return [NoTexts()]


class NoTexts(Head):
    """Gives each request that has been encoded a token, which means nothing: with it, the request ends."""

    def take(
        self, step: StepInputs, tensors: StepTensors, hidden: Tensor, launched: LaunchedStep, *, has_all: bool
    ) -> None:
        if len(step.sampled):
            launched.token_ids = Download([torch.zeros(len(step.sampled), dtype=torch.int64, device=hidden.device)])
