"""Handles request bodies: short ones on the event loop, longer ones on threads, so that they delay no streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request

from raycore.server.http.streaming import unless_client_leaves

T = TypeVar("T")

_SHORT_BYTES = 8_000
"""Bodies up to this size are handled on the event loop's thread. Rendering and tokenizing such a body takes no longer
than switching threads."""
_LONG_BYTES = 256_000
"""Larger bodies have threads of their own. Some take seconds, and everything else that isn't done on the event loop's
thread would wait for them."""
_NUM_LONG = 2
"""Number of such bodies that are handled at the same time."""


def add_long_bodies(app: FastAPI) -> None:
    """Give an application the threads for long bodies. They end with its lifespan, or when it is dropped."""
    app.state.long_bodies = ThreadPoolExecutor(_NUM_LONG, "raycore-long-bodies")  # has no threads yet
    before = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(running: FastAPI) -> AsyncGenerator[Any, None]:
        async with before(running) as state:
            try:
                yield state
            finally:
                end_long_bodies(app)

    app.router.lifespan_context = lifespan


def end_long_bodies(app: FastAPI) -> None:
    """End an application's threads for long bodies. What hasn't begun isn't done. Idempotent."""
    app.state.long_bodies.shutdown(wait=False, cancel_futures=True)


async def handle_body(
    request: Request, work: Callable[..., T], *args: Any, executor: Executor | None = None, more_bytes: int = 0
) -> T:
    """Run `work(*args)`, which handles the body of `request`, and return its result.

    A large body is handled on another thread, so that it delays no streams, and a long one on one of the application's
    threads for long bodies.

    Args:
        executor: runs the work, whatever the body's size.
        more_bytes: how much the work handles beside the body.

    Raises:
        ClientLeft: the client of a long body closed the connection. If the work hasn't begun, it isn't done.
    """
    num_bytes = len(await request.body()) + more_bytes
    if num_bytes <= _LONG_BYTES:
        return await off_loop(num_bytes, work, *args, executor=executor)
    executor = executor or request.app.state.long_bodies
    return await unless_client_leaves(request, off_loop(num_bytes, work, *args, executor=executor))


async def off_loop(num_bytes: int, work: Callable[..., T], *args: Any, executor: Executor | None = None) -> T:
    """Run `work(*args)`, which handles a request body of `num_bytes` bytes. With an `executor`, it runs there.

    For a large body, the work runs on another thread, so that it doesn't delay streams. A body of a megabyte takes a
    second or more.
    """
    if executor is not None:
        return await asyncio.get_running_loop().run_in_executor(executor, partial(copy_context().run, work, *args))
    if num_bytes <= _SHORT_BYTES:
        return work(*args)
    return await asyncio.to_thread(work, *args)
