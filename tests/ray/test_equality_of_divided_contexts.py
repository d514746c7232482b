"""Greedy tokens of workers that hold different tokens' keys and values equal transformers'.

`test_equality.py` says what is compared.
"""

from equality import CONTEXT_SHAPES, check_every_schedule, every_schedule


@every_schedule(*CONTEXT_SHAPES)
def test_every_schedule_gives_the_reference_tokens(workers, checkpoints, family, overlaps):
    check_every_schedule(workers, checkpoints, family, overlaps)
