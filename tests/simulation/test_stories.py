"""Nothing is wrong in these seeds, and each has one story, whatever folders, addresses and hashes are."""

from __future__ import annotations

import pytest

from simulation.forking import Programs

CAPABILITIES = ["pipeline", "experts", "models", "offload", "peers", "servers", "api_servers"]


@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    ("program", "num_seeds"),
    [
        ("tests.simulation --digests --seeds", 10),
        *((f"tests.simulation --deployment {capability} --digests --seeds", 3) for capability in CAPABILITIES),
        ("simulation.engine --digests --seeds", 12),
        ("simulation.program ranks", 60),
        ("simulation.program owners", 30),
        ("simulation.program exits", 6),
        ("simulation.program raising", 8),
    ],
)
def test_nothing_is_wrong_and_a_seed_has_one_story(
    program: str, num_seeds: int, programs: Programs, programs_elsewhere: Programs
):
    one, other = (each.run(*program.split(), "0", str(num_seeds)) for each in (programs, programs_elsewhere))
    assert [one.returncode, other.returncode] == [0, 0], one.stdout[-8000:] + one.stderr[-4000:]
    stories, again = (_stories(each.stdout, num_seeds) for each in (one, other))
    assert stories == again, "something depends on the order of a set, on an address or on a folder"
    assert len(set(stories)) == num_seeds
    assert "failed:" not in one.stdout


def _stories(printed: str, num_seeds: int) -> list[str]:
    """The lines for seeds, without the last line, which says how long they took."""
    return printed.splitlines()[:num_seeds]
