"""The format of log lines: level, time, logger, rank and process.

raycore's commands and the processes of ranks configure logging with this module. `LLM` and `AsyncLLM` don't configure
logging in the program that creates them.
"""

from __future__ import annotations

import logging

DATE_FORMAT = "%m-%d %H:%M:%S"

_LOGGER = "raycore"


def line_format(label: str = "") -> str:
    """The format of a process's log lines. `label` names the process's rank."""
    who = f"{label} pid %(process)d".lstrip()
    return f"%(levelname)s %(asctime)s %(name)s [{who}] %(message)s"


def own_level() -> int:
    """The log level of raycore's logger in this process. The processes of the engine's ranks get the same level."""
    return logging.getLogger(_LOGGER).getEffectiveLevel()


def log_as(label: str, level: int) -> None:
    """Log raycore's lines to standard error, with `label` in each line. For the processes of ranks and workers.

    Another call changes the label, for a standby that becomes a rank. Does nothing if the root logger has handlers,
    because then the cluster's operator has configured logging.
    """
    logger = logging.getLogger(_LOGGER)
    if logging.getLogger().handlers:
        return
    logger.setLevel(level)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    for handler in logger.handlers:
        handler.setFormatter(logging.Formatter(line_format(label), DATE_FORMAT))
