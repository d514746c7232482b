"""Seeds of engines of each capability find each fault that is put into the product."""

from __future__ import annotations

import pytest

from raycore.errors import RequestFailed
from simulation.cluster.deployments import injected
from simulation.cluster.deployments.lost_blocks import may_lack_blocks
from simulation.forking import Programs


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("name", list(injected.FAULTS))
def test_seeds_find_this_fault(name: str, programs: Programs):
    found = programs.run("simulation.cluster.deployments.injected", "--seeds", "60", "--faults", name)
    assert found.stdout.startswith(f"{name}: seed "), found.stdout + found.stderr


def test_blocks_that_were_not_loaded_excuse_a_request_only_where_they_may_be_lost():
    error = RequestFailed("keys and values of its prompt were not loaded, and kv_load_failure_policy is 'fail'")

    def options(policy: str, connector: str = "OffloadConnector", **settings: object) -> dict[str, object]:
        transfer = {"kv_load_failure_policy": policy, "kv_connector": connector, "kv_connector_extra_config": settings}
        return {"kv_transfer_config": transfer}

    assert may_lack_blocks(error, options("fail"), has_broken=True)
    assert may_lack_blocks(error, options("fail", load_timeout_s=0.01), has_broken=False)
    assert may_lack_blocks(error, options("fail", disk_bytes=1000), has_broken=False)
    assert may_lack_blocks(error, options("fail", "PeersConnector"), has_broken=False)
    assert not may_lack_blocks(error, options("fail", load_timeout_s=10.0), has_broken=False)
    assert not may_lack_blocks(error, options("recompute"), has_broken=True)
    assert not may_lack_blocks(RequestFailed("another reason"), options("fail"), has_broken=True)
    assert not may_lack_blocks(error, {}, has_broken=True)
