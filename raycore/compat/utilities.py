"""Small functions that scripts take from vLLM's `utils`, `logger`, `tokenizers` and `distributed`."""

from __future__ import annotations

import gc
import logging
import os
import resource
import socket
import uuid
from collections.abc import Hashable, Sequence
from enum import Enum
from functools import cache
from typing import Any

from raycore.checkpoint.hub_cache import find_directory
from raycore.node.ports import free_ports, joined, parse_address
from raycore.text.hf_tokenizer import HfTokenizer
from raycore.text.tokenizer import Tokenizer

_ANY_PUBLIC_ADDRESS = ("192.0.2.1", 9)
"""An address of the block for documentation (RFC 5737). Nothing is sent to it."""


def random_uuid() -> str:
    """A random id of 16 hexadecimal digits."""
    return uuid.uuid4().hex[:16]


def get_open_port() -> int:
    """A TCP port of this machine that is free, but not reserved."""
    return free_ports("127.0.0.1", 1)[0]


def get_open_ports_list(count: int = 5) -> list[int]:
    """The same for several different ports."""
    return free_ports("127.0.0.1", count)


def get_ip() -> str:
    """This machine's IPv4 address on the network that leads elsewhere; 127.0.0.1 if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ANY_PUBLIC_ADDRESS)  # chooses the interface, and sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def join_host_port(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return joined(host, port)


def split_host_port(host_port: str) -> tuple[str, int]:
    """The host and the port of `host:port`. Raises ValueError if the text isn't that."""
    return parse_address(host_port)


def set_ulimit(target_soft_limit: int = 65535) -> None:
    """Let this process open that many files, as far as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = target_soft_limit if hard == resource.RLIM_INFINITY else min(target_soft_limit, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first elements of an embedding, and how many it has."""
    shown = ", ".join(f"{each:.4f}" for each in embeds[:8])
    print(f"{prefix}: [{shown}{', ...' if len(embeds) > 8 else ''}] (size={len(embeds)})")


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free what this process no longer refers to. An engine's processes end with the engine, not here."""
    gc.collect()


def get_tokenizer(
    tokenizer_name: str | os.PathLike[str], *_: Any, revision: str | None = None, **__: Any
) -> HfTokenizer:
    """The tokenizer in a checkpoint's directory, or of a name on the hub that is in the cache.

    Settings that choose between implementations of tokenizers have no effect, because raycore has one.
    """
    name = os.fspath(tokenizer_name)
    return HfTokenizer.of(Tokenizer.from_dir(find_directory(name, "tokenizer.json", revision, of="tokenizer")))


cached_get_tokenizer = cache(get_tokenizer)


class UsageContext(str, Enum):
    """Where an engine runs, for vLLM's statistics of its use. Engines take it, and tell nobody."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """Also logs messages only the first time that they come."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._said: set[Hashable] = set()

    def debug_once(self, message: str, *args: Hashable, **_: Any) -> None:
        """Log at level debug unless the same was logged before."""
        self._once(logging.DEBUG, message, args)

    def info_once(self, message: str, *args: Hashable, **_: Any) -> None:
        """Log at level info unless the same was logged before."""
        self._once(logging.INFO, message, args)

    def warning_once(self, message: str, *args: Hashable, **_: Any) -> None:
        """Log a warning unless the same was logged before."""
        self._once(logging.WARNING, message, args)

    def error_once(self, message: str, *args: Hashable, **_: Any) -> None:
        """Log an error unless the same was logged before."""
        self._once(logging.ERROR, message, args)

    def _once(self, level: int, message: str, args: tuple[Hashable, ...]) -> None:
        if (level, message, args) not in self._said:
            self._said.add((level, message, args))
            self.log(level, message, *args)


@cache
def init_logger(name: str) -> _Logger:
    """The logger of that name, from Python's logging. It logs where and what the program configures."""
    return _Logger(logging.getLogger(name))
