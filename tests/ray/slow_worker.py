"""A worker whose steps take a while, so that a test can do something in the middle of a request."""

import time

from raycore.worker.worker import Worker

STEP_S = 0.02


class SlowWorker(Worker):
    def execute_model(self, plan):
        time.sleep(STEP_S)
        return super().execute_model(plan)
