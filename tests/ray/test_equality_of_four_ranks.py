"""Greedy tokens of four tensor-parallel workers equal transformers'. `test_equality.py` says what is compared."""

from equality import check_every_schedule, every_schedule


@every_schedule((4, 1, 1, 1))
def test_every_schedule_gives_the_reference_tokens(workers, checkpoints, family, overlaps):
    check_every_schedule(workers, checkpoints, family, overlaps)
