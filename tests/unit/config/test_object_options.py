"""Each setting of an option that is an object changes what an engine does, or other values of it are refused.

The table has a row for each setting: two values of it, and what those who read it make of each. What takes more than a
few lines to see is in another test, which the row names. A new setting fails here until it has a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import msgspec
import pytest
from object_settings import (
    OFFLOADS,
    Settings,
    classifies,
    deadline,
    drafter,
    ec_class,
    ec_extra,
    events,
    fails_requests,
    files,
    guess_after,
    has_compact_json,
    kept_embeddings,
    kv_check,
    kv_class,
    offers,
    parsers,
    peers,
    pools,
    reads,
    recorded,
    routed,
    tags,
    told,
    told_store,
    trace_file,
    way,
)

from raycore.config import ENGINE_OPTIONS
from raycore.config.profiler import parse_profiler_config
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig
from raycore.parts.transfers.config.ec_transfer import ECStoreSettings
from raycore.parts.transfers.connectors.connector import KVConnector
from raycore.parts.transfers.connectors.embeddings import EmbeddingStore
from raycore.parts.transfers.connectors.offload.settings import OffloadSettings
from raycore.parts.transfers.connectors.offload.settings import read_settings as read_offload_settings
from raycore.parts.transfers.connectors.peers.settings import DisaggregationSettings, PeersSettings

TESTS = Path(__file__).parents[2]


class Shown(NamedTuple):
    """Two values of a setting, and what is made of an object with each."""

    values: tuple[Any, Any]
    made: Callable[[Settings], Any]
    others: Mapping[str, Any] = MappingProxyType({})
    """The object's other settings."""


class Refused(NamedTuple):
    """There is one value, and others are refused."""

    value: Any
    parse: Callable[[Settings], Any]
    others: Mapping[str, Any] = MappingProxyType({})


class Elsewhere(NamedTuple):
    """Another test shows it. It names the setting."""

    test: str


# ---- the table

NGRAM: Settings = {"method": "ngram", "num_speculative_tokens": 3}
SUFFIX: Settings = {"method": "suffix", "num_speculative_tokens": 8}
MODEL: Settings = {"method": "draft_model", "num_speculative_tokens": 3, "model": "another"}
EVENTS: Settings = {"enable_kv_cache_events": True, "endpoint": "inproc://events"}
STORE: Settings = {"ec_connector": "ECStoreConnector"}
PROFILE: Settings = {"profiler": "torch", "torch_profiler_dir": "profiles"}
PROFILED = (
    "unit/worker/test_worker_profile.py"
    "::test_a_worker_profile_begins_after_delay_iterations_and_ends_after_max_iterations"
)
PEERS = "unit/parts/transfers/connectors/test_peer_connectors.py"
LOOP = 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3


class OwnStore(EmbeddingStore):
    """A class of a user's."""


class OffloadConnector(KVConnector):
    """A class of a user's with the name of one of raycore's."""


ROWS: dict[str, Shown | Refused | Elsewhere] = {
    "speculative_config.method": Shown(("ngram", "suffix"), guess_after(*LOOP), {"num_speculative_tokens": 3}),
    "speculative_config.num_speculative_tokens": Shown(
        (3, 2), guess_after(1, 2, 3, 4, 1), {"method": "ngram", "prompt_lookup_max": 1}
    ),
    "speculative_config.model": Shown((demo_model_path(), "another"), lambda each: drafter(each).path, MODEL),
    "speculative_config.draft_tensor_parallel_size": Shown(
        (1, 2), lambda each: drafter(each).tensor_parallel_size, MODEL
    ),
    "speculative_config.max_model_len": Shown((20, 30), lambda each: drafter(each).max_model_len, MODEL),
    "speculative_config.prompt_lookup_min": Shown((1, 2), guess_after(1, 9, 8, 1), {**NGRAM, "prompt_lookup_max": 2}),
    "speculative_config.prompt_lookup_max": Shown(
        (2, 3), guess_after(5, 1, 2, 7, 7, 7, 1, 2, 8, 0, 5, 1, 2), {**NGRAM, "prompt_lookup_min": 2}
    ),
    "speculative_config.suffix_decoding_max_tree_depth": Shown((24, 4), guess_after(*LOOP), SUFFIX),
    "speculative_config.suffix_decoding_max_cached_requests": Shown(
        (9, 0), guess_after(1, 2, 3, finished=([9, 1, 2, 3, 4, 5],)), SUFFIX
    ),
    "speculative_config.suffix_decoding_max_spec_factor": Shown((1.0, 0.4), guess_after(*LOOP), SUFFIX),
    "speculative_config.suffix_decoding_min_token_prob": Shown(
        (0.1, 0.9), guess_after(1, 2, 3, 8, 1, 2, 4, 9, 1, 2), SUFFIX
    ),
    "speculative_config.num_speculative_tokens_per_batch_size": Elsewhere(
        "unit/engine/test_drafting_engine.py::speculative"
    ),
    "kv_transfer_config.kv_connector": Shown(("OffloadConnector", "PeersConnector"), kv_class),
    "kv_transfer_config.kv_role": Shown(("kv_both", "kv_producer"), offers, OFFLOADS),
    "kv_transfer_config.engine_id": Shown((None, "other"), told, {"kv_connector": "DisaggregationConnector"}),
    "kv_transfer_config.kv_connector_extra_config": Shown(
        ({"always_load": True}, {"always_load": False}), offers, OFFLOADS
    ),
    "kv_transfer_config.kv_connector_module_path": Shown(
        ("raycore.parts.transfers.connectors.offload.connector", __name__), kv_class, OFFLOADS
    ),
    "kv_transfer_config.kv_load_failure_policy": Shown(("recompute", "fail"), fails_requests, OFFLOADS),
    "offload.cpu_bytes_to_use": Shown((100, 1000), files),
    "offload.path": Shown((None, "/a/path"), files),
    "offload.disk_bytes": Shown((1000, 2000), files, {"path": "/a/path"}),
    "offload.load_timeout_s": Shown((1.0, 2.0), deadline),
    "offload.always_load": Shown((True, False), lambda each: offers({**OFFLOADS, "kv_connector_extra_config": each})),
    "offload.spec_name": Refused("CPUOffloadingSpec", read_offload_settings),
    "offload.eviction_policy": Refused("lru", read_offload_settings),
    "peers.min_fetch_tokens": Shown((32, 36), reads),
    "peers.fetch_timeout_s": Shown((1.0, 2.0), reads),
    "peers.compare_costs": Shown((False, True), reads),
    "peers.num_threads": Shown((1, 2), peers),
    "peers.host": Shown(("10.0.0.1", ""), peers),
    "peers.num_prefill_ranks": Shown((0, 1), routed, {"min_prefill_tokens": 16}),
    "peers.min_prefill_tokens": Shown((16, 100), routed),
    "peers.secret_file": Elsewhere(
        "unit/parts/transfers/connectors/test_peer_tickets.py::test_a_secret_is_not_too_short"
    ),
    "peers.lease_s": Elsewhere(f"{PEERS}::test_a_computed_prompt_is_kept_for_the_rank_that_goes_on"),
    "kv_events_config.enable_kv_cache_events": Shown((True, False), events, {"endpoint": "inproc://events"}),
    "kv_events_config.publisher": Shown(("zmq", "null"), events, EVENTS),
    "kv_events_config.endpoint": Shown(("inproc://one", "inproc://other"), events, {"enable_kv_cache_events": True}),
    "kv_events_config.replay_endpoint": Shown((None, "inproc://again"), events, EVENTS),
    "kv_events_config.buffer_steps": Shown((1, 2), events, EVENTS),
    "kv_events_config.hwm": Shown((1, 2), events, EVENTS),
    "kv_events_config.max_queue_size": Shown((1, 2), events, EVENTS),
    "kv_events_config.topic": Shown(("", "kv"), events, EVENTS),
    "ec_transfer_config.ec_connector": Shown(("ECStoreConnector", f"{__name__}.OwnStore"), ec_class),
    "ec_transfer_config.ec_role": Shown(("ec_both", "ec_producer"), kept_embeddings, STORE),
    "ec_transfer_config.engine_id": Shown(("one", "other"), told_store, {"ec_connector": f"{__name__}.OwnStore"}),
    "ec_transfer_config.ec_connector_extra_config": Shown(
        ({"cpu_bytes_to_use": 0}, {"cpu_bytes_to_use": 1000}), kept_embeddings, STORE
    ),
    "store.cpu_bytes_to_use": Shown((0, 1000), ec_extra),
    "store.path": Shown((None, "images"), ec_extra),
    "store.max_path_bytes": Shown((1000, 2000), ec_extra, {"path": "images"}),
    "profiler_config.torch_profiler_dir": Shown(("one", "other"), trace_file, {"profiler": "torch"}),
    "profiler_config.profiler": Refused("torch", parse_profiler_config, PROFILE),
    "profiler_config.torch_profiler_with_stack": Shown((True, False), recorded, PROFILE),
    "profiler_config.torch_profiler_record_shapes": Shown((True, False), recorded, PROFILE),
    "profiler_config.torch_profiler_with_memory": Shown((True, False), recorded, PROFILE),
    "profiler_config.torch_profiler_with_flops": Shown((True, False), recorded, PROFILE),
    "profiler_config.torch_profiler_use_gzip": Shown((True, False), trace_file, PROFILE),
    "profiler_config.delay_iterations": Elsewhere(PROFILED),
    "profiler_config.max_iterations": Elsewhere(PROFILED),
    "weight_transfer_config.backend": Shown(("ray", "disk"), way),
    "weight_transfer_config.timeout_s": Elsewhere(
        "unit/parts/weights/transfer/test_ways.py::test_workers_wait_for_a_trainer_no_longer_than_the_option_says"
    ),
    "reasoning_config.reasoning_parser": Shown(("deepseek_r1", "openai_gptoss"), tags),
    "reasoning_config.reasoning_start_str": Shown(("<a>", "<b>"), tags, {"reasoning_end_str": "</a>"}),
    "reasoning_config.reasoning_end_str": Shown(("</a>", "</b>"), tags, {"reasoning_start_str": "<a>"}),
    "structured_outputs_config.disable_any_whitespace": Shown((True, False), has_compact_json),
    "structured_outputs_config.reasoning_parser": Shown(("deepseek_r1", "mistral"), parsers),
    "structured_outputs_config.reasoning_parser_plugin": Shown(("a.py", "b.py"), parsers),
    "pooler_config.task": Shown(("embed", "token_embed"), pools),
    "pooler_config.pooling_type": Shown(("MEAN", "LAST"), pools),
    "pooler_config.seq_pooling_type": Shown(("MEAN", "LAST"), pools),
    "pooler_config.tok_pooling_type": Shown(("ALL", "STEP"), classifies, {"step_tag_id": 3}),
    "pooler_config.use_activation": Shown((True, False), pools),
    "pooler_config.dimensions": Shown((8, 16), pools),
    "pooler_config.logit_mean": Shown((1.0, 2.0), classifies),
    "pooler_config.logit_sigma": Shown((1.5, 2.0), classifies),
    "pooler_config.step_tag_id": Shown((3, 4), classifies, {"tok_pooling_type": "STEP"}),
    "pooler_config.returned_token_ids": Shown(([1], [2]), classifies),
}
"""By object and setting. `offload`, `peers` and `store` are what connectors get as their extra_config."""
EXTRAS: dict[str, type[msgspec.Struct]] = {
    "offload": OffloadSettings,
    "peers": DisaggregationSettings,
    "store": ECStoreSettings,
}


def structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The objects that an option's type admits."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for each in get_args(kind):
        yield from structs(each)


def objects() -> dict[str, type[msgspec.Struct]]:
    """The struct of each option that is an object with known settings."""
    given = [option for option in ENGINE_OPTIONS.values() if option._declared.expected == "a dict or a JSON object"]
    found = {option.name: next(structs(option._type), None) for option in given}
    known = {name: struct for name, struct in found.items() if struct is not None}
    del known["override_pooler_config"]  # an older name of another
    return known | EXTRAS


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written there."""
    monkeypatch.chdir(tmp_path)


def test_each_setting_has_a_row() -> None:
    expected = {f"{name}.{field}" for name, struct in objects().items() for field in struct.__struct_fields__}
    assert set(ROWS) == expected
    assert set(PeersSettings.__struct_fields__) < set(DisaggregationSettings.__struct_fields__)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if isinstance(row, Shown)])
def test_another_value_of_a_setting_makes_a_difference(name: str) -> None:
    row, setting = ROWS[name], name.partition(".")[2]
    assert isinstance(row, Shown)
    one, other = ({**row.others, setting: value} for value in row.values)
    made = row.made(one)
    assert made == row.made(one), "equal values make none"
    assert made != row.made(other)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if isinstance(row, Refused)])
def test_other_values_of_a_setting_are_refused(name: str) -> None:
    row, setting = ROWS[name], name.partition(".")[2]
    assert isinstance(row, Refused)
    row.parse({**row.others, setting: row.value})
    with pytest.raises(InvalidConfig, match=setting):
        row.parse({**row.others, setting: "another"})


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if isinstance(row, Elsewhere)])
def test_the_test_that_a_row_names_is_there_and_names_the_setting(name: str) -> None:
    row, setting = ROWS[name], name.partition(".")[2]
    assert isinstance(row, Elsewhere)
    path, _, test = row.test.partition("::")
    source = (TESTS / path).read_text()
    body = source.partition(f"\ndef {test}(")[2].partition("\ndef ")[0]
    assert setting in body


HONOURED = {
    ("OffloadConnector", "kv_role"): ("kv_producer", offers),
    ("DisaggregationConnector", "kv_role"): ("kv_consumer", told),
    ("DisaggregationConnector", "engine_id"): ("other", told),
}


@pytest.mark.parametrize("connector", ["OffloadConnector", "PeersConnector", "DisaggregationConnector"])
@pytest.mark.parametrize(("setting", "value"), [("kv_role", "kv_producer"), ("engine_id", "other")])
def test_each_connector_honours_a_setting_or_refuses_it(connector: str, setting: str, value: str) -> None:
    plain: Settings = {"kv_connector": connector}
    if (connector, setting) in HONOURED:
        value, made = HONOURED[connector, setting]
        assert made(plain) != made({**plain, setting: value})
    else:
        extra = {"path": "blocks"} if connector == "OffloadConnector" else {}
        with pytest.raises(InvalidConfig, match=f"{setting}='{value}'"):
            kv_check({**plain, setting: value, "kv_connector_extra_config": extra})
