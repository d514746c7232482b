"""Paths that change the weights of the engine, served with the option `enable_admin_endpoints`. All are vLLM's but two:
/cancel_weight_update and /reload_weights."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager

from fastapi import FastAPI
from starlette.responses import Response

from raycore.server.endpoints import Endpoint
from raycore.server.generation import ServingEngine
from raycore.server.http_counts import WEIGHT_UPDATE
from raycore.server.openapi.document import responses
from raycore.server.openapi.response_models import Renamed, Told, WeightInfo, WorldSize
from raycore.server.protocol import (
    FinishWeightUpdateRequest,
    InitWeightTransferRequest,
    ReloadWeightsRequest,
    UpdateWeightsRequest,
    UpdateWeightVersionRequest,
)
from raycore.server.streaming import JSON

_ERRORS = (400, 401, 500, 503)
_BODY_ERRORS = (408, 413, *_ERRORS)


def add_weight_endpoints(app: FastAPI, engine: ServingEngine) -> None:
    """Add the paths to the application."""

    def counted(operation: str) -> AbstractContextManager[None]:
        return app.state.http_counts.operation(WEIGHT_UPDATE, operation)

    @Endpoint.INIT_WEIGHT_TRANSFER.route(app, responses=responses(Told, *_BODY_ERRORS))
    async def init_weight_transfer_engine(body: InitWeightTransferRequest) -> Response:
        """Have all workers connect to a trainer."""
        with counted("init"):
            await engine.init_weight_transfer_engine({"init_info": body.init_info})
        return JSON({"message": "Weight transfer initialized"})

    @Endpoint.SHUTDOWN_WEIGHT_TRANSFER.route(app, responses=responses(Told, *_ERRORS))
    async def shutdown_weight_transfer_engine() -> Response:
        """Have all workers disconnect from the trainer."""
        with counted("shutdown"):
            await engine.shutdown_weight_transfer_engine()
        return JSON({"message": "Weight transfer shut down"})

    @Endpoint.START_WEIGHT_UPDATE.route(app, responses=responses(Told, *_ERRORS))
    async def start_weight_update() -> Response:
        """Begin to change the weights. The engine is paused until the update ends."""
        with counted("start"):
            await engine.start_weight_update()
        return JSON({"message": "Weight update started"})

    @Endpoint.START_DRAFT_WEIGHT_UPDATE.route(app, responses=responses(Told, *_ERRORS))
    async def start_draft_weight_update() -> Response:
        """Refused: the weights of draft models can't be changed."""
        with counted("start_draft"):
            await engine.start_draft_weight_update()
        return JSON({"message": "Draft weight update started"})

    @Endpoint.UPDATE_WEIGHTS.route(app, responses=responses(Told, *_BODY_ERRORS))
    async def update_weights(body: UpdateWeightsRequest) -> Response:
        """Bring tensors to all workers."""
        with counted("update"):
            await engine.update_weights({"update_info": body.update_info})
        return JSON({"message": "Weights updated"})

    @Endpoint.FINISH_WEIGHT_UPDATE.route(app, responses=responses(Told, *_BODY_ERRORS))
    async def finish_weight_update(body: FinishWeightUpdateRequest | None = None) -> Response:
        """Apply what has come, and continue."""
        with counted("finish"):
            await engine.finish_weight_update(None if body is None else body.weight_version)
        return JSON({"message": "Weight update finished"})

    @Endpoint.CANCEL_WEIGHT_UPDATE.route(app, responses=responses(Told, *_ERRORS))
    async def cancel_weight_update() -> Response:
        """Give up an update, and continue with the weights that were there before."""
        with counted("cancel"):
            await engine.cancel_weight_update()
        return JSON({"message": "Weight update cancelled"})

    @Endpoint.RELOAD_WEIGHTS.route(app, responses=responses(Told, *_BODY_ERRORS))
    async def reload_weights(body: ReloadWeightsRequest | None = None) -> Response:
        """Take the weights of a checkpoint of the same model, in place."""
        asked = ReloadWeightsRequest() if body is None else body
        with counted("reload"):
            await engine.reload_weights(asked.path, asked.weight_version)
        return JSON({"message": "Weights reloaded"})

    @Endpoint.UPDATE_WEIGHT_VERSION.route(app, responses=responses(Renamed, *_BODY_ERRORS))
    async def update_weight_version(body: UpdateWeightVersionRequest) -> Response:
        """Call the weights something else, without changing them."""
        await engine.update_weight_version(body.new_version)
        return JSON({"success": True, "new_version": body.new_version})

    @Endpoint.WEIGHT_INFO.route(app, responses=responses(WeightInfo, *_ERRORS))
    async def weight_info() -> Response:
        """What the weights are called."""
        return JSON({"weight_version": await engine.get_weight_version()})

    @Endpoint.GET_WORLD_SIZE.route(app, responses=responses(WorldSize, *_ERRORS))
    async def get_world_size(include_dp: bool = True) -> Response:
        """The number of workers: of all ranks or, without `include_dp`, of one."""
        num_ranks = max(1, len((await asyncio.to_thread(engine.read_metrics)).ranks)) if include_dp else 1
        return JSON({"world_size": engine.config.parallel.world_size * num_ranks})
