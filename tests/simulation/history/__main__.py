"""Does the simulated world find faults that this project has had?

    python -m tests.simulation.history                       looks for all, in 100 seeds of each program
    python -m tests.simulation.history 829ccd79 --seeds 500

Copies the sources into a temporary directory, puts each fault back there, and runs seeds of each program of the
simulated world until one fails. A seed that fails without the fault, too, doesn't count, and one that runs none
of the lines that the fault changes needn't run again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import msgspec

from simulation.history import faults
from simulation.history.faults import DoesNotApply, Fault
from simulation.history.look import Looked
from simulation.history.programs import PLAYERS

ROOT = Path(__file__).parents[3]
_COPIED = ("raycore", "placement", "tests/simulation", "tests/support")
Sound = dict[str, list[Looked]]
"""By program: its seeds without any fault."""


def main() -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.simulation.history", description=__doc__, formatter_class=plain)
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="which faults, by default all")
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="how many seeds of each program may look")
    parser.add_argument("--programs", nargs="+", choices=PLAYERS, default=list(PLAYERS), help="which may look")
    parser.add_argument("--at-statements", action="store_true", help="change threads between any two statements")
    parser.add_argument("--deployment", help="only engines of this kind, in whole clusters: see `cluster/deployments`")
    given = parser.parse_args()
    unknown = [commit for commit in given.commits if commit not in faults.known()]
    if unknown:
        parser.error(f"there is no fault {unknown[0]}; there are {', '.join(faults.known())}")
    more, applies = ["--at-statements"] if given.at_statements else [], True
    if given.deployment is not None:
        more += ["--deployment", given.deployment]
    with _copy() as root:
        sound = {name: list(_look(root, name, range(given.seeds), "--marks", *more)) for name in given.programs}
        for name, runs in sound.items():
            print(f"{name}: {len(runs)} seeds without faults in {sum(run.cpu_s for run in runs):.0f} CPU s")
            for run in runs:
                if run.problem:
                    print(f"    seed {run.seed} fails without a fault: {_line(run.problem)}")
        for commit in given.commits or faults.known():
            fault = faults.read(commit)
            try:
                with fault.applied(root):
                    told = _tell(commit, fault, sound, root, more)
            except DoesNotApply as error:
                applies, told = False, f"NO LONGER APPLIES: {error}"
            print(f"{commit}  {fault.subject}\n    {told}", flush=True)
    return not applies


def _tell(commit: str, fault: Fault, sound: Sound, root: Path, more: Sequence[str]) -> str:
    """What seeds make of the fault in the sources under `root`, in words."""
    if fault.impossible:
        return f"can't come back: {fault.impossible}"
    told: list[str] = []
    for program, runs in sound.items():
        seeds = [run.seed for run in runs if not run.problem and commit in run.reached]
        cpu_s = 0.0
        for run in _look(root, program, seeds, *more):
            cpu_s += run.cpu_s
            if run.problem:
                which = f"seed {run.seed} ({seeds.index(run.seed) + 1}. of {len(seeds)} that get there)"
                return f"found by {program}, {which}, in {cpu_s:.1f} CPU s: {_line(run.problem)}"
        told.append(f"{program} ({len(seeds)} of {len(runs)} get there, {cpu_s:.1f} CPU s)")
    return f"not found by {', '.join(told)}"


def _line(problem: str) -> str:
    said = problem.strip().splitlines()
    return (said[0] if len(said) == 1 else f"{said[0]} … {said[-1]}")[:300]


@contextmanager
def _copy() -> Iterator[Path]:
    """A copy of the sources, with what is compiled of them."""
    # so Python calls what it is writing, and it is gone when it is written
    ignore = shutil.ignore_patterns("*.pyc.*")
    with tempfile.TemporaryDirectory(prefix="raycore-history-") as name:
        for part in _COPIED:
            shutil.copytree(ROOT / part, Path(name) / part, ignore=ignore)
        yield Path(name)


def _look(root: Path, program: str, seeds: Sequence[int], *more: str) -> Iterator[Looked]:
    """Run seeds in the sources under `root`."""
    if not seeds:
        return
    paths = [str(root / part) for part in ("", "tests", "tests/support")]
    command = [sys.executable, "-m", "simulation.history.look", program, ",".join(map(str, seeds)), *more]
    with subprocess.Popen(
        command,
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            with suppress(msgspec.DecodeError):
                yield msgspec.json.decode(line, type=Looked)
                continue
            said += line
    if process.returncode < 0:  # by somebody else: no fault's doing
        raise RuntimeError(f"{program} was ended by signal {-process.returncode}")
    if process.returncode:
        yield Looked(seeds[0], 0.0, f"the program ends at once:\n{said}")


if __name__ == "__main__":
    sys.exit(main())
