"""Workers that take a while, so that a test can do something meanwhile."""

import time

from raycore.worker.worker import Worker

STEP_S = 0.02
READ_S = 0.3


class SlowWorker(Worker):
    """Takes a while for a step."""

    def execute_model(self, plan):
        time.sleep(STEP_S)
        return super().execute_model(plan)


class SlowReader(Worker):
    """Takes a while to read an adapter."""

    def _read_adapter(self, adapter):
        time.sleep(READ_S)
        return super()._read_adapter(adapter)
