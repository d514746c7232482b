"""Models of what endpoints for operators answer, for the OpenAPI document. The server itself sends plain values."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Version(BaseModel):
    version: str


class Load(BaseModel):
    server_load: int


class Success(BaseModel):
    success: bool


class Status(BaseModel):
    status: str


class SleepStatus(Status):
    level: int


class WakeStatus(Status):
    tags: list[str] | None


class Paused(BaseModel):
    is_paused: bool


class Sleeping(BaseModel):
    is_sleeping: bool


class ServerInfo(BaseModel):
    vllm_config: dict[str, Any] | str
    vllm_env: dict[str, str]
    system_env: dict[str, str]


class Aborted(Status):
    aborted: int


class RpcResults(BaseModel):
    results: list[Any]


class Told(BaseModel):
    message: str


class Scaling(BaseModel):
    is_scaling_elastic_ep: bool
