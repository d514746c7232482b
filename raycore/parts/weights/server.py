"""Paths that change the weights of the engine, served with the option `enable_admin_endpoints`. All are vLLM's but two:
/cancel_weight_update and /reload_weights."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Any

from pydantic import BaseModel

from raycore.server.contract.handlers import answers
from raycore.server.contract.service import Context
from raycore.server.http.counts import WEIGHT_UPDATE
from raycore.server.operations.response_models import Success, Told
from raycore.server.protocol import Fields, List, Text


class InitWeightTransferRequest(Fields):
    """Body of `POST /init_weight_transfer_engine`."""

    init_info: dict[str, Any]


class UpdateWeightsRequest(Fields):
    """Body of `POST /update_weights`."""

    update_info: dict[str, Any] | List[dict[str, Any]]
    """For all workers, or a list with an entry for each worker of all ranks."""


class FinishWeightUpdateRequest(Fields):
    """Body of `POST /finish_weight_update`."""

    weight_version: Text | None = None


class ReloadWeightsRequest(FinishWeightUpdateRequest):
    """Body of `POST /reload_weights`."""

    path: Text | None = None


class UpdateWeightVersionRequest(Fields):
    """Body of `POST /update_weight_version`."""

    new_version: Text


class Renamed(Success):
    new_version: str


class WeightInfo(BaseModel):
    weight_version: str


class WorldSize(BaseModel):
    world_size: int


def _counted(context: Context, operation: str) -> AbstractContextManager[None]:
    return context.service.http_counts.operation(WEIGHT_UPDATE, operation)


@answers(Told)
async def init_weight_transfer_engine(context: Context, body: InitWeightTransferRequest) -> dict[str, Any]:
    """Have all workers connect to a trainer."""
    with _counted(context, "init"):
        await context.engine.init_weight_transfer_engine({"init_info": body.init_info})
    return {"message": "Weight transfer initialized"}


@answers(Told)
async def shutdown_weight_transfer_engine(context: Context) -> dict[str, Any]:
    """Have all workers disconnect from the trainer."""
    with _counted(context, "shutdown"):
        await context.engine.shutdown_weight_transfer_engine()
    return {"message": "Weight transfer shut down"}


@answers(Told)
async def start_weight_update(context: Context) -> dict[str, Any]:
    """Begin to change the weights. The engine is paused until the update ends."""
    with _counted(context, "start"):
        await context.engine.start_weight_update()
    return {"message": "Weight update started"}


@answers(Told)
async def start_draft_weight_update(context: Context) -> dict[str, Any]:
    """Refused: the weights of draft models can't be changed."""
    with _counted(context, "start_draft"):
        await context.engine.start_draft_weight_update()
    return {"message": "Draft weight update started"}


@answers(Told)
async def update_weights(context: Context, body: UpdateWeightsRequest) -> dict[str, Any]:
    """Bring tensors to all workers."""
    with _counted(context, "update"):
        await context.engine.update_weights({"update_info": body.update_info})
    return {"message": "Weights updated"}


@answers(Told)
async def finish_weight_update(context: Context, body: FinishWeightUpdateRequest | None = None) -> dict[str, Any]:
    """Apply what has come, and continue."""
    with _counted(context, "finish"):
        await context.engine.finish_weight_update(None if body is None else body.weight_version)
    return {"message": "Weight update finished"}


@answers(Told)
async def cancel_weight_update(context: Context) -> dict[str, Any]:
    """Give up an update, and continue with the weights that were there before."""
    with _counted(context, "cancel"):
        await context.engine.cancel_weight_update()
    return {"message": "Weight update cancelled"}


@answers(Told)
async def reload_weights(context: Context, body: ReloadWeightsRequest | None = None) -> dict[str, Any]:
    """Take the weights of a checkpoint of the same model, in place."""
    asked = ReloadWeightsRequest() if body is None else body
    with _counted(context, "reload"):
        await context.engine.reload_weights(asked.path, asked.weight_version)
    return {"message": "Weights reloaded"}


@answers(Renamed)
async def update_weight_version(context: Context, body: UpdateWeightVersionRequest) -> dict[str, Any]:
    """Call the weights something else, without changing them."""
    await context.engine.update_weight_version(body.new_version)
    return {"success": True, "new_version": body.new_version}


@answers(WeightInfo)
async def weight_info(context: Context) -> dict[str, Any]:
    """What the weights are called."""
    return {"weight_version": await context.engine.get_weight_version()}


@answers(WorldSize)
async def get_world_size(context: Context, include_dp: bool = True) -> dict[str, Any]:
    """The number of workers: of all ranks or, without `include_dp`, of one."""
    num_ranks = max(1, len((await asyncio.to_thread(context.engine.read_metrics)).ranks)) if include_dp else 1
    return {"world_size": context.engine.config.parallel.world_size * num_ranks}
