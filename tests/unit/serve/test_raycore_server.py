"""`RaycoreServer` has what Ray asks of a `server_cls`. Neither Serve nor an engine runs."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from raycore.errors import EngineDeadError, InvalidConfig
from raycore.serve import RaycoreServer

protocol = pytest.importorskip("ray.llm._internal.serve.core.protocol")


def llm_config(**fields: Any) -> Any:
    given = {"model_loading_config": {"model_id": "org/m", "model_source": "path"}, **fields}
    return SimpleNamespace(model_dump=lambda exclude_unset: given)


def test_it_has_the_methods_of_rays_protocol():
    for name, theirs in vars(protocol.LLMServerProtocol).items():
        if name.startswith("_") or not inspect.isfunction(theirs):
            continue
        ours = getattr(RaycoreServer, name)
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs), name
        kinds = [
            [(each.kind, each.default) for each in inspect.signature(of).parameters.values()] for of in (ours, theirs)
        ]
        assert kinds[0] == kinds[1] or name in ("start_profile", "stop_profile"), name


def test_its_deployment_has_no_placement_group_of_its_own():
    options = RaycoreServer.get_deployment_options(
        llm_config(deployment_config={"num_replicas": 2}, accelerator_type="H100", server_cls=RaycoreServer)
    )
    assert not [name for name in options if name.startswith("placement_group")]
    assert (options["num_replicas"], options["ray_actor_options"]) == (2, {"num_cpus": 0})
    assert "name" not in options
    with pytest.raises(InvalidConfig, match="LLMConfig: unknown option 'max_num_seq'"):
        RaycoreServer.get_deployment_options(llm_config(engine_kwargs={"max_num_seq": 1}))


def test_it_says_when_its_engine_has_not_been_started():
    server = RaycoreServer.sync_init(llm_config())
    with pytest.raises(EngineDeadError, match="call start"):
        asyncio.run(server.check_health())
