"""A scheduler that starts the newest waiting request first."""

from raycore.scheduler.policy import WaitingQueue
from raycore.scheduler.scheduler import Scheduler


class _NewestFirst(WaitingQueue):
    def urgency(self, request):
        return (-request.arrival, 0)


class NewestFirst(Scheduler):
    def __init__(self, config, cache, num_blocks, vocab_size, **options):
        super().__init__(config, cache, num_blocks, vocab_size, **options)
        self._waiting = _NewestFirst(config.policy)
