"""Workers that tell of the LoRA adapters that they hold."""

import time

from raycore.parts.adapters.worker import AdapterReader
from raycore.worker.worker import Worker

READ_S = 0.3


class ProbedWorker(Worker):
    """Counts what it holds."""

    def num_adapters(self):
        return len(self._core.model.adapters._adapters)

    def num_layers_known(self):
        return len(self._core.model.adapters._layers)


class SlowReader(ProbedWorker):
    """Takes a while to read an adapter."""

    def init_device(self):
        super().init_device()
        reader = self._parts[AdapterReader]
        read = reader.read

        def read_slowly(adapter):
            time.sleep(READ_S)
            return read(adapter)

        reader.read = read_slowly
