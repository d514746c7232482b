import pytest

from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.worker.rank import RankIdentity


@pytest.fixture
def make_core():
    cores: list[EngineCore] = []

    def make(config):
        cores.append(EngineCore(config, InlineExecutor(config, RankIdentity(0, 1))))
        return cores[-1]

    yield make
    for core in cores:
        core.shutdown()
