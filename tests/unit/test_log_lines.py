"""Lines of a rank's process, in a process of its own: logging is configured once for all."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

STAMP = r"\d\d-\d\d \d\d:\d\d:\d\d"


def lines_of(code: str) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", f"import logging\nfrom raycore.node.logs import log_as\n{code}"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return run.stderr.splitlines()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "log_as('dp1 tp0', logging.INFO); logging.getLogger('raycore.engine.core').info('here')",
            [rf"INFO {STAMP} raycore\.engine\.core \[dp1 tp0 pid \d+\] here"],
        ),
        ("log_as('dp1', logging.WARNING); logging.getLogger('raycore.engine.core').info('here')", []),
        (
            "log_as('standby', logging.INFO); log_as('dp2', logging.INFO); logging.getLogger('raycore.x').info('here')",
            [rf"INFO {STAMP} raycore\.x \[dp2 pid \d+\] here"],
        ),
        (
            "logging.basicConfig(format='%(message)s', level='INFO')\n"
            "log_as('dp1', logging.WARNING); logging.getLogger('raycore.x').info('theirs')",
            ["theirs"],
        ),
    ],
)
def test_log_lines_name_the_process_that_wrote_them(code, expected):
    lines = lines_of(code)
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line
