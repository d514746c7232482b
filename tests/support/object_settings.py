"""What is made of options that are objects, seen where it is made, in a few lines for each setting.

Each function takes an object's settings, and returns what differs if one of them does. They write into the current
directory.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from drafts_by_slot import by_slot
from fake_connector import FakeConnector

from raycore.cache_layout import CacheGroup, CacheLayout, CacheLimits, KVCacheConfig
from raycore.client.client import make_tokenizer
from raycore.client.request_checks import RequestChecks
from raycore.client.routing import Router
from raycore.config import resolve
from raycore.config.profiler import parse_profiler_config
from raycore.demo import demo_model_path
from raycore.messages import EngineRequest
from raycore.parts.constraints.config.reasoning import parse_reasoning_config
from raycore.parts.constraints.config.structured_outputs import parse_structured_outputs_config, parsers_of
from raycore.parts.drafts.config.speculative import parse_speculative_config
from raycore.parts.drafts.guesses.ngram import NgramGuesses
from raycore.parts.drafts.guesses.suffix import SuffixGuesses
from raycore.parts.transfers.client.routes import PrefixTransfers
from raycore.parts.transfers.config.ec_transfer import ECTransferConfig, parse_ec_transfer_config
from raycore.parts.transfers.config.kv_transfer import parse_kv_events_config, parse_kv_transfer_config
from raycore.parts.transfers.connectors.connector import ConnectorSetup, connector_class
from raycore.parts.transfers.connectors.embeddings import EmbeddingStore, store_class
from raycore.parts.transfers.connectors.offload.scheduler import OffloadScheduler
from raycore.parts.transfers.connectors.offload.settings import read_settings as read_offload_settings
from raycore.parts.transfers.connectors.offload.worker import OffloadWorker
from raycore.parts.transfers.connectors.peers.hints import RemoteBlocks, address_text, as_hints
from raycore.parts.transfers.connectors.peers.notes import WorkerInfo
from raycore.parts.transfers.connectors.peers.scheduler_side import DisaggregationScheduler, PeersScheduler
from raycore.parts.transfers.connectors.peers.settings import DisaggregationSettings, read_settings
from raycore.parts.transfers.connectors.peers.wire import PeerAddress
from raycore.parts.transfers.connectors.peers.worker_side import PeersWorker
from raycore.parts.transfers.scheduler.transfers import Transfers
from raycore.parts.weights.config import parse_weight_transfer_config
from raycore.parts.weights.transfer.ways import make_way
from raycore.sampling_params import SamplingParams
from raycore.worker import worker_profile
from raycore.worker.worker_profile import WorkerProfile

Settings = dict[str, Any]
ADDRESS = address_text(PeerAddress("machine", "local", "host", 1, b"token", "layout"))


def guess(settings: Settings, tokens: list[int], *finished: list[int]) -> list[int]:
    """What is guessed after `tokens`."""
    config = parse_speculative_config(settings)
    assert config is not None
    guesses: Any = NgramGuesses(config) if config.method == "ngram" else SuffixGuesses(config, perf_counter)
    for output in finished:
        guesses.finished.add(output)
    running: Any = SimpleNamespace(tokens=np.array([tokens], np.int32), received=np.array([len(tokens)]))
    found = guesses.guess(np.array([0]), running, np.array([100]), lambda slots, lengths, drafting_s: lengths)
    return by_slot(found).get(0, [])


def guess_after(*tokens: int, finished: tuple[list[int], ...] = ()) -> Callable[[Settings], list[int]]:
    return lambda settings: guess(settings, list(tokens), *finished)


def another_model() -> str:
    """Another directory with the demo model."""
    folder = Path("another").absolute()
    if not folder.exists():
        shutil.copytree(demo_model_path(), folder)
    return str(folder)


def drafter(settings: Settings) -> Any:
    """The model that drafts, as workers get it."""
    given = {name: another_model() if value == "another" else value for name, value in settings.items()}
    return resolve(demo_model_path(), tensor_parallel_size=2, speculative_config=given).drafter


def kv_class(settings: Settings) -> type[Any]:
    return connector_class(SimpleNamespace(kv_transfer_config=parse_kv_transfer_config(settings)))  # pyright: ignore[reportArgumentType]


def kv_check(settings: Settings) -> None:
    """What the connector checks at the start."""
    config = SimpleNamespace(
        kv_transfer_config=parse_kv_transfer_config(settings), cache=SimpleNamespace(enable_prefix_caching=True)
    )
    kv_class(settings).check(config)


def fails_requests(settings: Settings) -> bool:
    config = parse_kv_transfer_config(settings)
    assert config is not None
    return Transfers(FakeConnector(4), config).fails_requests


def setup_of(settings: Settings) -> ConnectorSetup:
    config: Any = SimpleNamespace(
        kv_transfer_config=parse_kv_transfer_config(settings),
        kv_events_config=None,
        tokens_per_block=4,
        engine_name="engine",
    )
    cache = KVCacheConfig(9, CacheLayout((CacheGroup("full", ()),), CacheLimits(4, 64, 64)))
    return ConnectorSetup(config, cache, 0, 1)


def offers(settings: Settings) -> tuple[int | None, bool]:
    """What the scheduler's side offers of a block that the host's memory has, where computing takes no time."""
    extra = settings.get("kv_connector_extra_config", {"always_load": True})
    side = OffloadScheduler(setup_of(settings), read_offload_settings(extra))
    side._slot_of[b"block"] = 0
    side._cost.compute_s = lambda num_blocks: 0.0
    request: Any = SimpleNamespace(digests=[b"block"], tokens=range(5), seq_id=1)
    return side.get_num_new_matched_tokens(request, 0)


OFFLOADS = {"kv_connector": "OffloadConnector"}
CACHES: Any = SimpleNamespace(block_bytes=100, layout="layout")


def files(settings: Settings) -> Any:
    """What a worker asks of the directory, and how much memory it has."""
    asked: list[Any] = []

    class Files:
        def __init__(self, *args: Any) -> None:
            asked.append(args)
            self.directory = args[0]

        def check(self) -> None:
            pass

    class Worker(OffloadWorker):
        files_class = Files  # pyright: ignore[reportAssignmentType]

    made = Worker(setup_of(OFFLOADS), read_offload_settings(settings))
    with pytest.MonkeyPatch.context() as patched:
        module = sys.modules[OffloadWorker.__module__]
        patched.setattr(module, "_Writer", lambda files: None)
        patched.setattr(module, "_Reader", lambda *args: None)
        made.register_kv_caches(CACHES)
    return asked, made.get_handshake_metadata()


def deadline(settings: Settings) -> float:
    """Until when a worker waits for files that it is to read at second 0."""
    made = OffloadWorker(setup_of(OFFLOADS), read_offload_settings(settings))
    started: list[Any] = []
    reader: Any = SimpleNamespace(start=started.append, cancel=lambda jobs: None)
    made._reader, made.metadata = reader, b""
    orders = SimpleNamespace(clears_files=False, saves=[], loads=[], jobs=["job"], cancelled=[])
    with pytest.MonkeyPatch.context() as patched:
        module = sys.modules[OffloadWorker.__module__]
        patched.setattr(module, "orders_decoder", SimpleNamespace(decode=lambda data: orders))
        patched.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))
        made.start_load_kv(None)  # pyright: ignore[reportArgumentType]
    (job,) = started
    return job.deadline_s


def peers(settings: Settings) -> Any:
    """With what a worker serves and reads blocks."""
    asked: list[Any] = []
    made = PeersWorker(read_settings(_peers_config(settings), DisaggregationSettings), 0)
    made.server_class = lambda *args: asked.append(args[-1])  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.MonkeyPatch.context() as patched:
        module = sys.modules[PeersWorker.__module__]
        patched.setattr(module, "BlockReader", lambda caches, num_threads: asked.append(num_threads))
        made.register_kv_caches(CACHES)
    return asked


def _with_extra(settings: Settings) -> Settings:
    return {"kv_connector": "DisaggregationConnector", "kv_connector_extra_config": settings}


def events(settings: Settings) -> Any:
    """What publishes events. None: nothing does."""
    pytest.importorskip("zmq")
    from raycore.parts.transfers.engine import KVEvents

    config: Any = SimpleNamespace(kv_events_config=parse_kv_events_config(settings))
    made = KVEvents(config, 0, None)
    publisher: Any = made._publisher
    if publisher is None:
        return None
    limits = publisher._kept.maxlen, publisher._queue.maxsize, publisher._publishing.get_hwm()
    made_of = publisher.endpoint, publisher.replay_endpoint, publisher._topic, limits
    publisher.close()
    return made_of


def kept_embeddings(settings: Settings) -> list[bool]:
    """Whether a store has the embeddings that it was given, and those that another one in its directory was given."""
    shared = {"ec_connector": "ECStoreConnector", "ec_connector_extra_config": {"path": str(Path("images").absolute())}}
    stores = [EmbeddingStore(_ec(each), "model") for each in (shared, settings)]
    for store, name in zip(stores, ("a", "b"), strict=True):
        store.save(name, np.arange(200, dtype=np.uint8))
    return [stores[1].load(name, 200) is not None for name in ("a", "b")]


def _ec(settings: Settings) -> ECTransferConfig:
    config = parse_ec_transfer_config(settings)
    assert config is not None
    return config


def told_store(settings: Settings) -> str | None:
    """What a class of a user's is told that its engine is called."""
    config = _ec(settings)
    return store_class(config)(config, "model")._config.engine_id


def ec_extra(settings: Settings) -> Any:
    """The same of `ec_connector_extra_config`, and what is asked of the directory."""
    whole = {"ec_connector": "ECStoreConnector", "ec_connector_extra_config": settings}
    asked: list[Any] = []

    class Files:
        def __init__(self, *args: Any) -> None:
            asked.append(args[2:])

        def check(self) -> None:
            pass

        write = check

    class Store(EmbeddingStore):
        files_class = Files  # pyright: ignore[reportAssignmentType]

    Store(_ec(whole), "model")
    return asked, kept_embeddings(whole)


def recorded(settings: Settings) -> Settings:
    """What torch's profiler is told to record."""
    told: Settings = {}

    class Profile:
        def __init__(self, **options: Any) -> None:
            told.update(options)

        def __enter__(self) -> None:
            pass

    runner = SimpleNamespace(parts=list)
    made: Any = SimpleNamespace(_config=parse_profiler_config(settings), _runner=runner)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(worker_profile, "profile", Profile)
        patched.setattr(worker_profile, "RecordedParts", lambda *args: None)
        WorkerProfile._begin(made, Path("file"))
    return told


def trace_file(settings: Settings) -> tuple[str, str]:
    config = parse_profiler_config(settings)
    assert config is not None
    path = config.trace_path("dp0", None, "trace")
    return path.parent.name, path.suffix


def way(settings: Settings) -> str:
    config = parse_weight_transfer_config(settings)
    assert config is not None
    return type(make_way(config, 0, torch.device("cpu"))).__name__


def tags(settings: Settings) -> Any:
    config = parse_reasoning_config(settings)
    assert config is not None
    return config.tags()


def parsers(settings: Settings) -> Any:
    return parsers_of(parse_structured_outputs_config(settings))


def pools(settings: Settings) -> Any:
    """What a model of embeddings pools."""
    return resolve(demo_model_path(), load_format="dummy", convert="embed", pooler_config=settings).model.spec.pooling


def classifies(settings: Settings) -> Any:
    options: Settings = {"convert": "classify", "hf_overrides": {"num_labels": 3}}
    return resolve(demo_model_path(), load_format="dummy", **options, pooler_config=settings).model.spec.pooling


def reads(settings: Settings) -> Any:
    """What the scheduler's side has workers read of another rank's 32 tokens, where computing takes no time."""
    side = PeersScheduler(
        setup_of(_with_extra(settings)), read_settings(_peers_config(settings), DisaggregationSettings)
    )
    side.set_xfer_handshake_metadata({0: msgspec.msgpack.encode(WorkerInfo("own", 1000))})
    side._cost.is_worth_fetching = lambda num_blocks, is_local, num_read: False
    digests = [bytes([number]) * 16 for number in range(10)]
    request: Any = SimpleNamespace(
        seq_id=7, tokens=np.zeros(41), digests=digests, is_aborted=False, hints=as_hints(RemoteBlocks([ADDRESS], 32))
    )
    num_tokens, _ = side.get_num_new_matched_tokens(request, 0)
    side.update_state_after_alloc(request, range(8), num_tokens or 0)
    return [(len(fetch.blocks), fetch.timeout_s) for fetch in side._fetches]


def _peers_config(settings: Settings) -> Any:
    return setup_of(_with_extra({"compare_costs": False, "min_fetch_tokens": 8, **settings})).config


def told(settings: Settings) -> tuple[Any, bool]:
    """What a caller is told of an engine that has computed a prompt, and whether it lets others read."""
    side = DisaggregationScheduler(setup_of(settings), DisaggregationSettings())
    side.set_xfer_handshake_metadata({0: msgspec.msgpack.encode(WorkerInfo("own", 1000))})
    asked = {"do_remote_decode": True}
    request: Any = SimpleNamespace(
        seq_id=7, is_aborted=False, num_computed_tokens=34, hands_over=False, hints=None, kv_transfer_params=asked
    )
    answer = side.request_finished(request, range(9))[1] or {}
    return answer.get("remote_engine_id"), bool(side.addresses)


def routed(settings: Settings) -> bool:
    """Whether another rank than the one that computes a prompt of 49 tokens goes on."""
    router = Router()
    routes = PrefixTransfers(router, 4, read_settings(_peers_config(settings), DisaggregationSettings))
    for dp_rank in range(2):
        routes.add_rank(dp_rank, ["worker"])
        router.add(dp_rank)
    asked = EngineRequest(0, "r", list(range(1, 50)), SamplingParams(max_tokens=8), 0)
    return routes.route(asked, None, None).hands_over


def ec_class(settings: Settings) -> type[Any]:
    return store_class(_ec(settings))


def has_compact_json(settings: Settings) -> bool:
    """Whether a client has JSON of all requests written without white space."""
    config = resolve(demo_model_path(), structured_outputs_config=settings)
    return RequestChecks(config, make_tokenizer(config.model))._has_compact_json
