"""Serves raycore's engine with the deployments of `ray.serve.llm`, and calls them as Ray's ingress does.

python ray_llm_program.py ADDRESS PORT CONFIGS

CONFIGS: JSON. By name of an application, which is its path, too: the `LLMConfig` of its model. Each line of standard
input is a call: JSON of the application, the method, the class of the request and its fields. A line of output is what
the call yielded: a list of texts, and of [name of the response's class, its fields]. The end of the input ends it all.

Ray's ingress itself isn't used, because that of Ray 2.60 fails with FastAPI 0.165.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import ray
from ray import serve


def main(address: str, port: str, configs: str) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # Ray prints warnings of its own
    paths = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
    ray.init(address=address, log_to_driver=False, runtime_env=paths)
    from ray.llm._internal.serve.core.ingress.builder import _build_direct_streaming_llm_deployment
    from ray.serve.llm import LLMConfig

    from raycore.serve import RaycoreServer

    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    for name, given in json.loads(configs).items():
        config = LLMConfig(**given, server_cls=RaycoreServer)
        serve.run(_build_direct_streaming_llm_deployment(config), name=name, route_prefix=f"/{name}")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(asyncio.run(called(*json.loads(line)))), file=answers, flush=True)
    serve.shutdown()


async def called(app: str, method: str, kind: str, fields: dict[str, Any]) -> list[Any]:
    from ray.llm._internal.serve.core.configs import openai_api_models
    from ray.llm._internal.serve.core.protocol import RawRequestInfo

    server = serve.get_app_handle(app).options(stream=True)
    request, info = getattr(openai_api_models, kind)(**fields), RawRequestInfo({"X-Request-Id": "mine"})
    return [
        each if isinstance(each, str) else [type(each).__name__, each.model_dump()]
        async for each in getattr(server, method).remote(request, info)
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
