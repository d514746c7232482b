"""The log of a server's connections: which of them it leaves out, and a configuration of Python's logging in a file."""

from __future__ import annotations

import json
import logging
import logging.config
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from raycore.errors import InvalidConfig


def configure_logging(path: str) -> None:
    """Configure Python's logging as a file says, in JSON or YAML. Loggers that it doesn't name stay as they are.

    Raises:
        InvalidConfig: the file can't be read, or isn't such a configuration.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        found: Any = json.loads(text) if path.endswith(".json") else _yaml(text)
    except OSError as error:
        raise InvalidConfig(f"log_config_file={path!r} can't be read: {error.strerror}") from error
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise InvalidConfig(f"log_config_file={path!r} is neither JSON nor YAML: {reason}") from error
    if not isinstance(found, dict):
        raise InvalidConfig(f"log_config_file={path!r} isn't a mapping")
    config = {"disable_existing_loggers": False, **cast("dict[str, Any]", found)}
    try:
        logging.config.dictConfig(config)
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        cause = f": {error.__cause__}" if error.__cause__ is not None else ""
        raise InvalidConfig(f"log_config_file={path!r} isn't a configuration of logging: {error}{cause}") from error


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


class WithoutPaths(logging.Filter):
    """Leaves requests with these paths out of uvicorn's log of requests."""

    def __init__(self, paths: Collection[str]) -> None:
        super().__init__()
        self._paths = frozenset(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the request is logged."""
        args = record.args
        if not isinstance(args, tuple) or len(args) < 3:
            return True
        return str(args[2]).partition("?")[0] not in self._paths  # the client, the method, the path
