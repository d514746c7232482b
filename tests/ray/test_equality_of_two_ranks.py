"""Greedy tokens of two tensor-parallel workers, and of two stages, equal transformers'.

`test_equality.py` says what is compared.
"""

from equality import check_every_schedule, every_schedule


@every_schedule((2, 1, 1, 1), (1, 2, 1, 1))
def test_every_schedule_gives_the_reference_tokens(workers, checkpoints, family, overlaps):
    check_every_schedule(workers, checkpoints, family, overlaps)
