"""Runs scenarios on a real cluster of several nodes, as a program of its own. Prints a line of JSON for each.

Arguments: the names of the rows. None: all. Fails if one has another outcome than its row admits.
"""

from __future__ import annotations

import json
import sys
import traceback

import installed_ray
from rows_of_nodes import NODES


def main(names: list[str]) -> int:
    rows = [row for row in NODES if row.source is None and (not names or row.name in names)]
    status = 0
    with installed_ray.cluster(keeps_state=any(row.needs_state for row in rows)):
        for row in rows:
            begun_s = installed_ray.now_s()
            try:
                found = repr(row.scenario(installed_ray))
            except Exception:
                found = traceback.format_exc()
            is_admitted = found in {*row.admits, *row.seldom}
            took_s = round(installed_ray.now_s() - begun_s, 1)
            told = {"row": row.name, "outcome": found, "is_admitted": is_admitted, "took_s": took_s}
            print(json.dumps(told), flush=True)
            status |= not is_admitted
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
