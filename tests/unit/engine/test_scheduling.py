"""What a scheduler is made of: parts by the configuration, and for classes of somebody else what parts are made of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from configs import make_config
from families import make_checkpoint

from raycore.config import CacheConfig, EngineConfig, LoRAConfig, SchedulerConfig, resolve
from raycore.engine.scheduling import Shared, load_scheduler_for, make_scheduler
from raycore.errors import InvalidConfig
from raycore.messages import EngineRequest
from raycore.parts.adapters.scheduler import AdapterLimit
from raycore.parts.constraints.scheduler import Constraints
from raycore.parts.drafts.config.speculative import SpeculativeConfig
from raycore.parts.drafts.scheduler.drafting import DraftPlanning
from raycore.parts.drafts.scheduler.speculation import Speculation
from raycore.parts.transfers.config.kv_transfer import KVTransferConfig
from raycore.parts.transfers.scheduler.cache_events import CacheEvents
from raycore.parts.transfers.scheduler.transfers import Transfers
from raycore.sampling_params import SamplingParams
from raycore.scheduler.prefixes import Prefixes
from raycore.scheduler.scheduler import Scheduler

CACHE = SimpleNamespace(num_blocks=8, layout=None, num_state_parts=0)
SPECULATION = Speculation(SpeculativeConfig("ngram", 2), 4)
CONNECTOR: Any = SimpleNamespace()
EVENTS: Any = SimpleNamespace(events=[])
ALL = Shared(SPECULATION, CONNECTOR, EVENTS)


class Subclass(Scheduler):
    """As in the documentation: it hands on all that it gets."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheConfig, num_blocks: int, vocab_size: int, **options: Any
    ) -> None:
        super().__init__(config, cache, num_blocks, vocab_size, **options)


class Foreign:
    """Notes what it gets."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.options = options


def test_a_class_of_somebody_else_that_cannot_have_workers_draft_is_refused() -> None:
    config = make_config()
    scheduler = msgspec.structs.replace(config.scheduler, async_scheduling=True, scheduler_cls=f"{__name__}.Foreign")
    config = msgspec.structs.replace(config, scheduler=scheduler)
    assert load_scheduler_for(config) is Foreign
    speculating = msgspec.structs.replace(config, speculative_config=SpeculativeConfig("ngram", 2))
    with pytest.raises(InvalidConfig, match="isn't a subclass of raycore's Scheduler"):
        load_scheduler_for(speculating)
    own = msgspec.structs.replace(scheduler, scheduler_cls=f"{__name__}.Subclass")
    assert load_scheduler_for(msgspec.structs.replace(speculating, scheduler=own)) is Subclass


def test_a_class_of_somebody_else_brings_no_states_back(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_next", tmp_path)
    offload = {"kv_connector": "OffloadConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1}}
    config = resolve(path, scheduler_cls=f"{__name__}.Foreign")
    assert load_scheduler_for(config) is Foreign
    with pytest.raises(InvalidConfig, match="can't bring back states of layers"):
        load_scheduler_for(resolve(path, scheduler_cls=f"{__name__}.Foreign", kv_transfer_config=offload))
    assert load_scheduler_for(resolve(path, kv_transfer_config=offload)) is Scheduler


def full_config() -> EngineConfig:
    lora = LoRAConfig(enable_lora=True, max_loras=3)
    return msgspec.structs.replace(make_config(), lora=lora, kv_transfer_config=KVTransferConfig("fake"))


def made(kind: Any, config: EngineConfig, shared: Shared) -> Any:
    return make_scheduler(kind, config, CACHE, shared)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", [Scheduler, Subclass])
def test_raycores_scheduler_and_its_subclasses_get_the_parts_that_the_configuration_asks_for(kind: type) -> None:
    parts = made(kind, full_config(), ALL).parts
    kinds = [Prefixes, DraftPlanning, Transfers, CacheEvents, AdapterLimit, Constraints]
    assert [type(part) for part in parts] == kinds
    assert [type(part) for part in made(kind, make_config(), Shared()).parts] == [Prefixes, Constraints]
    config = make_config()
    without = msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, enable_prefix_caching=False))
    assert [type(part) for part in made(kind, without, Shared()).parts] == [Constraints]


def test_another_class_gets_what_parts_are_made_of() -> None:
    common = {"tells_tokens": False, "num_turns": 1, "layout": None}
    config = full_config()
    assert made(Foreign, config, ALL).options == common | {
        "speculation": SPECULATION,
        "max_adapters": 3,
        "connector": (CONNECTOR, config.kv_transfer_config),
        "kv_events": EVENTS.events,
    }
    # what is always given, and may be ignored
    assert made(Foreign, make_config(), Shared()).options == common | {"speculation": None, "max_adapters": 0}


def test_without_the_part_nothing_is_cached() -> None:
    for parts, num_cached in (([], 0), ([Prefixes()], 12)):
        scheduler = Scheduler(SchedulerConfig(1, 64, 64), CacheConfig(4, True, 0.9), 16, 50, parts=parts)
        for seq_id in range(2):
            scheduler.submit(EngineRequest(seq_id, "r", list(range(1, 15)), SamplingParams(max_tokens=1), 0))
            plan = scheduler.schedule()
            assert plan is not None
            (new,) = plan.new_requests
            scheduler.abort([seq_id])
        assert new.num_computed_tokens == num_cached
