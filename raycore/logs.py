"""How log lines look: when, which logger, which rank and process.

Programs of raycore's own and the processes of its ranks configure logging with this; the library never does.
"""

from __future__ import annotations

import logging

DATE_FORMAT = "%m-%d %H:%M:%S"

_LOGGER = "raycore"


def line_format(label: str = "") -> str:
    """The format of a process's lines; `label` says which rank it is."""
    who = f"{label} pid %(process)d".lstrip()
    return f"%(levelname)s %(asctime)s %(name)s [{who}] %(message)s"


def own_level() -> int:
    """From which level on raycore logs in this process: what the processes of its ranks are given."""
    return logging.getLogger(_LOGGER).getEffectiveLevel()


def log_as(label: str, level: int) -> None:
    """Have this process, which is a rank's or a worker's, write raycore's lines to standard error under `label`.

    Called again, for a process that has become another rank, it changes the label. Where logging has been configured,
    by whoever runs the cluster, it is left as it is.
    """
    logger = logging.getLogger(_LOGGER)
    if logging.getLogger().handlers:
        return
    logger.setLevel(level)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    for handler in logger.handlers:
        handler.setFormatter(logging.Formatter(line_format(label), DATE_FORMAT))
