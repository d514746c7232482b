"""The page about caches lists all that there are, and each has a test that what its value depends on is in its key."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_finder import caches_below, caches_in
from configs import make_config
from pydantic import BaseModel
from tokenizers_for_tests import byte_level, sentencepiece_like, write

from raycore.parts.constraints.client import ThinkingLimits
from raycore.parts.pooling.server import encoding
from raycore.parts.transfers.connectors.peers.hints import address_text, parse_address
from raycore.parts.transfers.connectors.peers.tickets import tickets_of
from raycore.parts.transfers.connectors.peers.wire import PeerAddress
from raycore.server.chat import call_format
from raycore.server.dialects.messages.systems import has_one_system
from raycore.server.protocol import nullable_names
from raycore.text import chat_template, stop_strings
from raycore.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "caches.md"

NOT_CACHES = {
    "what is under way": """
        checkpoint.module_patterns._Name._found
        client.output_processor.OutputProcessor._requests
        client.queue_calls.QueueCalls._queue
        client.request_table.RequestTable._asked_again
        client.requests_by_rank.RequestsByRank._ids
        client.request_table.RequestTable._computed
        client.reserved_ids.ReservedIds._on_end
        client.step_queue.StepQueue._updates
        client.streams.Streams._loops
        cluster.connection._ends
        cluster.connection._starts
        cluster.local_ray.own_processes._reapers
        control.control_actor.EngineControl._outcomes
        engine.mailbox.Mailbox._outboxes
        parts.constraints.grammar.schema._Reduction._definitions
        kvcache.block_pool.BlockPool._cached
        node.listeners._offered
        node.own_process._made
        running_engine._kept
        metrics.engines._engines
        sampling.row_masks.FollowedGrammars._failures
        sampling.row_masks.FollowedGrammars._matchers
        sampling.processor_batch.ProcessorBatch._outputs
        parts.servers.cluster.coordinator.Coordinator._here
        parts.servers.cluster.coordinator.Coordinator._notes
        parts.images.scheduler.EncoderInputs._num_users
        parts.images.scheduler.EncoderInputs._partial
        scheduler.scheduler.Scheduler._requests
        parts.transfers.scheduler.transfers.Transfers._sending
        parts.adapters.server.adapters.OfferedAdapters._changing
        server.batch.files.RequestFile.line_numbers
        server.multi_process.api_servers.APIServers._without
        server.batch.files.ResultFile.done
        server.parsers.tool_calls.pythonic.PythonicParser._given
        server.dialects.responses.store.MemoryStore._entries
        server.http.route_index.RouteIndex._routes
        server.contract.service.Service._own
        simulation.deployment.Deployment._params
        parts.weights.worker.update.WeightUpdate._waiting
    """,
    "figures and logs": """
        cli.bench.samples._ids_with_texts
        client.inter_token_latency.InterTokenLatency._last_s
        client.inter_token_latency.InterTokenLatency._latest
        client.output_kinds.OutputKinds._taken
        client.recorder.Recorder._ranks
        compat.utilities._Logger._said
        compat.utilities.init_logger
        metrics.ray_export.RayExport._last_counters
        metrics.ray_export.RayExport._last_gauges
        metrics.ray_export.RayExport._metrics
        metrics.stat_loggers.StatLoggers._of_ranks
        metrics.throughput_log.ThroughputLog._hit_rates
        parts.traces.client.spans.SentTraces._pids
        recurring.Recurring._said
        rpc.start_phases._latest
        server.http.counts.HttpCounts.durations
        server.http.counts.HttpCounts.in_flight
        server.http.counts.HttpCounts.operations
        server.http.counts.HttpCounts.requests
        server.http.ignored_fields._logged
        simulation.step_times.MeasuredTimes._told
    """,
    "constants": """
        decoder.network.NO_TAPS
        models.spec.ModelSpec.attention_by_layer
        models.spec.ModelSpec.attentions
        models.spec.ModelSpec.feed_forward_kinds
        models.spec.ModelSpec.feed_forwards
        models.spec.ModelSpec.mixer_kinds
        models.spec.ModelSpec.mixers
        server.openapi.value_ranges._NOTHING
        text.gguf_tokenizer._GPT2
    """,
}
"""What looks like a cache and isn't one, by what it is."""

SEEN_BY_NOBODY = {
    "parts.transfers.connectors.offload.files.BlockFiles.write",
    "kernels.gpu.bound_kernel.BoundKernel._compiled",
    "kvcache.cache_log.CacheLog._held",
    "kvcache.prefix_cache.PrefixCache._block_of",
    "parts.images.vision.images.Images._kept",
}
"""Caches on the page that `cache_finder` can't tell from other state."""

SHOWN_BY = {
    "kvcache.prefix_cache": "kvcache/test_prefix_cache.py::test_a_blocks_digest_depends_on_the_whole_prefix",
    "kvcache.snapshots": "kvcache/test_snapshots.py::test_the_longest_prefix_with_a_state_is_found",
    "parts.images.scheduler": "engine/test_shared_embeddings.py::"
    "test_embeddings_of_other_weights_are_not_found_in_memory_nor_in_files",
    "parts.images.vision.images": "engine/test_image_engine.py::test_embeddings_are_computed_anew_after_a_reset",
    "parts.transfers.connectors.offload.scheduler": "engine/test_kept_results.py::"
    "test_an_engine_finds_nothing_of_older_weights_and_all_of_its_own",
    "parts.transfers.connectors.offload.files": "engine/test_kept_results.py::"
    "test_another_engine_finds_nothing_of_weights_that_it_has_not",
    "parts.transfers.connectors.peers.blocks": "worker/test_kept_forms.py::"
    "test_blocks_are_others_if_numbers_models_or_divisions_are",
    "parts.transfers.connectors.embeddings": "engine/test_shared_embeddings.py::"
    "test_embeddings_of_other_weights_are_not_found_in_memory_nor_in_files",
    "parts.images.client.inputs": "parts/images/client/test_image_prompts.py::"
    "test_a_name_stands_for_an_image_only_with_the_same_reading_processing_and_salt",
    "parts.images.engine": "parts/images/client/test_image_prompts.py::"
    "test_images_that_differ_in_anything_have_other_identifiers",
    "parts.images.client.sent_features": "parts/images/client/test_sent_features.py::"
    "test_data_is_sent_to_each_rank_once_until_it_has_nothing",
    "text.gguf_tokenizer": "text/test_gguf_tokenizer.py::test_every_text_comes_back",
    "parts.constraints.grammar.free_text": "parts/constraints/grammar/test_free_text.py::"
    "test_reasoning_tags_that_cannot_work_are_refused",
    "parts.constraints.grammar.compiler": "parts/constraints/grammar/test_grammar_compiler.py::"
    "test_the_allowed_next_texts_follow_the_constraint",
    "parts.constraints.grammar.gate": "parts/constraints/grammar/test_grammar_gate.py::"
    "test_several_constraints_are_checked_together_and_the_first_refusal_is_raised",
    "parts.adapters.engine.slots": "parts/adapters/engine/test_adapters.py::"
    "test_an_adapter_that_is_read_again_gets_another_load_id",
    "parts.adapters.serve": "parts/adapters/test_adapters_serve.py::"
    "test_an_adapter_is_offered_until_others_take_its_place",
    "client.routing": "client/test_routing.py::test_prompts_with_different_cache_salts_share_no_prefix",
    "client.held_prefixes": "kvcache/test_cache_log.py::test_clients_ask_for_what_the_present_weights_have_computed",
    "kvcache.cache_log": "kvcache/test_cache_log.py::test_clients_ask_for_what_the_present_weights_have_computed",
    "checkpoint.gguf.header": "parts/transfers/connectors/test_identity.py::test_each_file_of_a_model_counts",
    "kernels.gpu.bound_kernel": "kernels/gpu/test_bound_kernel.py::test_launches_are_those_of_triton",
    "parts.weights.transfer.ways": "parts/weights/transfer/test_ways.py::"
    "test_workers_see_another_segment_with_the_name_of_one_before",
    "runner.recorded_layers": "runner/test_recorded_layers.py::test_recordings_compute_with_weights_that_have_changed",
    "trainer": "test_trainer.py::test_numbers_have_the_bits_of_an_engines_also_after_the_weights_have_changed",
}
"""By module: a test that changes what values depend on, and sees others."""

PROCESS = {
    "compat.parsers",
    "compat.server",
    "options.declared",
    "data.engine",
    "fallback.interface",
    "kernels.gpu.attention",
    "kernels.gpu.rows",
    "kernels.library",
    "layers.gate",
    "layers.linear",
    "layers.operations",
    "plugins",
    "runner.decode_graphs",
    "serve.router",
    "parts.adapters.server.adapters",
    "parts.drafts.scheduler.step_times",
    "parts.drafts.guesses.suffix",
    "step.device_batch",
    "weights.checkpoint_reader",
    "weights.update_plan",
    "parts.weights.worker.units",
}
"""Modules whose caches belong to an object or a process for which nothing changes that values depend on."""


def test_every_cache_is_on_the_page_and_nothing_else() -> None:
    found = caches_below(ROOT / "raycore")
    others = {name for names in NOT_CACHES.values() for name in names.split()}
    listed = on_the_page()
    assert sorted(found - listed - others) == [], "add them to docs/caches.md, or to NOT_CACHES"
    assert sorted((listed | others) - found - SEEN_BY_NOBODY) == [], "they are gone"
    assert not listed & others


def test_every_row_of_the_page_has_a_test() -> None:
    shown = {*SHOWN_BY, *PROCESS, *map(module_of, CHANGES)}
    modules = {module_of(name) for name in on_the_page()}
    assert sorted(modules - shown) == []
    assert sorted({*SHOWN_BY, *PROCESS} - modules) == []
    for test in SHOWN_BY.values():
        file, _, name = test.partition("::")
        tree = ast.parse((Path(__file__).parent / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


SOURCE = """
from functools import cache, lru_cache

made = {}
CONSTANT = {"a": 1}

@lru_cache(maxsize=3)
def result(): ...

class A:
    @cache
    def method(self): ...

    def __init__(self):
        self.order: OrderedDict[str, int] = OrderedDict()
        self.state = {}
        self.memo = {}

    def of(self, key):
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = key + self.state[key]
        return found
"""


def test_caches_of_all_kinds_are_found() -> None:
    assert caches_in(SOURCE) == {"made", "result", "A.method", "A.order", "A.memo"}


def on_the_page() -> set[str]:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [line.split("|")[2] for line in rows]
    return {name for cell in cells for name in re.findall(r"`([a-z_0-9]+(?:\.\w+)+)`", cell)}


def module_of(name: str) -> str:
    parts = name.split(".")
    while not (ROOT / "raycore" / Path(*parts)).with_suffix(".py").exists():
        parts.pop()
    return ".".join(parts)


# ---- values that follow from an argument


class _First(BaseModel):
    a: int = 1


class _Second(BaseModel):
    b: int = 1


PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
NAMED = "{% for message in messages %}{{ message.role == 'developer' }} {{ message.content[0] }}{% endfor %}"
FIRST_ONLY = "{{ messages[0].content }}"


def address(host: str) -> str:
    return address_text(PeerAddress("machine", "", host, 1, b"token", "layout"))


def tokenizers(path: Path) -> list[Tokenizer]:
    """Two tokenizers with other tokens and other templates."""
    natives = {PLAIN: byte_level(), NAMED: sentencepiece_like()}
    return [
        Tokenizer.from_dir(write(path / str(number), native, {"chat_template": template}))
        for number, (template, native) in enumerate(natives.items())
    ]


def tag_ids(tokenizer: Tokenizer, tag: str) -> list[int]:
    return ThinkingLimits(make_config(), tokenizer)._ids(tag)


CHANGES: dict[str, Callable[[list[Tokenizer]], tuple[Any, Any]]] = {
    "text.chat_template._compile": lambda made: (
        chat_template._compile("a").render(),
        chat_template._compile("b").render(),
    ),
    "text.chat_template._developer_role": lambda made: (
        chat_template._developer_role(PLAIN, ()),
        chat_template._developer_role(NAMED + "{{ messages[0].content }}", ()),
    ),
    "text.chat_template._takes_parts": lambda made: (
        chat_template._takes_parts(PLAIN, ()),
        chat_template._takes_parts(PLAIN.replace("content", "content[0].text"), ()),
    ),
    "server.chat.call_format._inspect_template": lambda made: (
        call_format._inspect_template(made[0], PLAIN),
        call_format._inspect_template(made[0], "{{ tools }}"),
    ),
    "server.dialects.messages.systems.has_one_system": lambda made: (
        has_one_system(made[0], None),
        has_one_system(made[0], FIRST_ONLY),
    ),
    "text.tokenizer.Tokenizer._texts": lambda made: (made[0].token_text(300), made[1].token_text(300)),
    "parts.constraints.client.ThinkingLimits._token_ids": lambda made: (
        tag_ids(made[0], "the"),
        tag_ids(made[1], "the"),
    ),
    "text.stop_strings._borders": lambda made: (stop_strings._borders("aa"), stop_strings._borders("ab")),
    "parts.transfers.connectors.peers.hints.parse_address": lambda made: (
        parse_address(address("a")),
        parse_address(address("b")),
    ),
    "parts.transfers.connectors.peers.tickets.tickets_of": lambda made: (
        tickets_of(__file__)._proving,
        tickets_of(str(PAGE))._proving,
    ),
    "server.protocol.nullable_names": lambda made: (nullable_names(_First), nullable_names(_Second)),
    "parts.pooling.server.encoding._values_of_float8": lambda made: (
        encoding._values_of_float8(4, 3).tolist(),
        encoding._values_of_float8(5, 2).tolist(),
    ),
}
"""By the name of a cache: values for two different keys."""


@pytest.mark.parametrize("name", CHANGES)
def test_another_key_gives_another_value_and_the_same_key_the_same(name: str, tmp_path: Path) -> None:
    made = tokenizers(tmp_path)
    first = CHANGES[name](made)
    assert first[0] != first[1]
    assert CHANGES[name](made) == first
