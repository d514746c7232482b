"""The format of log lines: level, time, logger, rank and process.

raycore's commands and the processes of ranks configure logging with this module. The library never does.
"""

from __future__ import annotations

import logging

DATE_FORMAT = "%m-%d %H:%M:%S"

_LOGGER = "raycore"


def line_format(label: str = "") -> str:
    """The format of a process's log lines. `label` names its rank."""
    who = f"{label} pid %(process)d".lstrip()
    return f"%(levelname)s %(asctime)s %(name)s [{who}] %(message)s"


def own_level() -> int:
    """The log level of raycore in this process, which is passed to the processes of its ranks."""
    return logging.getLogger(_LOGGER).getEffectiveLevel()


def log_as(label: str, level: int) -> None:
    """Log raycore's lines to standard error under `label`. For the processes of ranks and workers.

    A second call changes the label, for a standby that becomes a rank. If the root logger has handlers, because the
    cluster's operator configured logging, nothing changes.
    """
    logger = logging.getLogger(_LOGGER)
    if logging.getLogger().handlers:
        return
    logger.setLevel(level)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    for handler in logger.handlers:
        handler.setFormatter(logging.Formatter(line_format(label), DATE_FORMAT))
