"""Faults that are put into the product, one or two for each kind of request, which seeds with such requests find.

python -m simulation.injected NAME...        with `tests` on the path
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from simulation.installation import install
from simulation.putting_in import first_find, look_for_all, substitute

install()

import msgspec  # noqa: E402

from raycore import sampling_params  # noqa: E402
from raycore.client import ask, output_kinds, prompt_embeds, streamed_prompts, streams  # noqa: E402
from raycore.client.ask import CheckedAsk  # noqa: E402
from raycore.client.client import EngineClient  # noqa: E402
from raycore.client.output_processor import OutputProcessor  # noqa: E402
from raycore.client.request_state import SequenceState  # noqa: E402
from raycore.client.request_table import RequestTable  # noqa: E402
from raycore.client.reserved_ids import ReservedIds  # noqa: E402
from raycore.engine import decoding  # noqa: E402
from raycore.kvcache import prefix_cache  # noqa: E402
from raycore.messages import EngineRequest  # noqa: E402
from raycore.parts.adapters.engine.slots import AdapterSlots  # noqa: E402
from raycore.parts.constraints.grammar.gate import ConstraintGate  # noqa: E402
from raycore.parts.constraints.scheduler import GrammarMasks  # noqa: E402
from raycore.parts.transfers.connectors.peers.hints import RemoteBlocks  # noqa: E402
from raycore.parts.transfers.connectors.peers.tickets import Tickets  # noqa: E402
from raycore.scheduler import request as scheduler_request  # noqa: E402
from raycore.scheduler.request import RepetitionDetector, RequestLimits  # noqa: E402
from raycore.scheduler.step_builder import InFlight, NewTokens  # noqa: E402
from simulation.cluster import kinds  # noqa: E402
from simulation.cluster.deployments import PLAIN  # noqa: E402
from simulation.cluster.making import scenario_of  # noqa: E402
from simulation.cluster.play import play  # noqa: E402
from simulation.scenario import Scenario  # noqa: E402

_MOST_SEEDS = 120
"""With requests of the kind."""


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    substitute(owner, name, make(getattr(owner, name)))


def _requests_lose(when: str, **lost: Any) -> None:
    """Requests lack fields, or parameters, from a method of the table of requests on."""

    def make(original: Any) -> Any:
        def changed(self: RequestTable, request: CheckedAsk | str, *args: Any) -> Any:
            result = original(self, request, *args)
            sequences = self._underway[request if isinstance(request, str) else request.request_id].sequences
            sequences[:] = [_without(each, lost) for each in sequences]
            return result

        return changed

    _replace(RequestTable, when, make)


def _without(request: EngineRequest, lost: dict[str, Any]) -> EngineRequest:
    fields = {name: value for name, value in lost.items() if name in EngineRequest.__struct_fields__}
    params = {name: value for name, value in lost.items() if name not in fields}
    return msgspec.structs.replace(request, **fields, params=msgspec.structs.replace(request.params, **params))


_moved_requests_lose, _new_requests_lose = (
    partial(partial, _requests_lose, "_rebind"),
    partial(partial, _requests_lose, "add"),
)


def _a_failed_adapter_takes_others_along() -> None:
    def make(original: Any) -> Any:
        def hear(self: Any) -> Any:
            failures = original(self)
            others = [key for key, own in self.adapters.items() if own.is_ready] if failures else []
            return failures + [self._fail(key, failures[0].error) for key in others]

        return hear

    _replace(AdapterSlots, "hear_from_workers", make)


def _embeddings_of_the_same_shape_are_taken_for_the_same() -> None:
    _replace(prompt_embeds, "_identifier", lambda _: lambda piece: str(piece.shape))


def _what_cannot_be_compiled_is_accepted() -> None:
    _replace(ConstraintGate, "_reason", lambda _: lambda self, asked: (None, True))


def _masks_are_those_of_the_step_before() -> None:
    def make(original: Any) -> Any:
        def made(self: GrammarMasks, step: int) -> Any:
            masks = original(self, step)
            before, self.__dict__["before"] = self.__dict__.get("before", masks), masks
            has_as_many = len(before.bitmask) == len(masks.bitmask)
            return msgspec.structs.replace(masks, bitmask=before.bitmask) if has_as_many else masks

        return made

    _replace(GrammarMasks, "make", make)


def _requests_that_go_on_get_no_masks() -> None:
    def make(original: Any) -> Any:
        def started(self: GrammarMasks, start: Any) -> None:
            if len(start.request.tokens) == start.request.num_prompt_tokens:
                original(self, start)

        return started

    _replace(GrammarMasks, "started", make)


def _the_token_after_an_accepted_draft_is_the_draft() -> None:
    def make(original: Any) -> Any:
        def new_tokens(self: InFlight, result: Any, table: Any) -> Any:
            new = original(self, result, table)
            is_same_request = new.rows[1:] == new.rows[:-1]
            token_ids = new.token_ids.copy()
            token_ids[1:][is_same_request] = new.token_ids[:-1][is_same_request]
            return NewTokens(new.rows, new.slots, new.positions, token_ids)

        return new_tokens

    _replace(InFlight, "new_tokens", make)


def _results_are_swapped() -> None:
    def make(original: Any) -> Any:
        def process(self: Any, batch: Any) -> Any:
            if len(batch.pooled) > 1:
                (first, one), (second, other), *rest = batch.pooled
                batch.pooled = [(first, other), (second, one), *rest]
            return original(self, batch)

        return process

    _replace(OutputProcessor, "process", make)


def _deltas_begin_where_the_last_but_one_ended() -> None:
    def make(original: Any) -> Any:
        def new(self: Any, whole: Any) -> Any:
            taken = self._taken.get(whole.index)
            before = taken and taken.num_tokens
            delta = original(self, whole)
            if taken and whole.finish_reason is None:
                taken.num_tokens = before
            return delta

        return new

    _replace(output_kinds.OutputKinds, "_new", make)


def _logprobs_come_twice_in_full_batches() -> None:
    def make(original: Any) -> Any:
        def add(self: SequenceState, entry: Any) -> None:
            original(self, entry)
            if len(self.token_ids) == 3 and self._logprobs is not None and len(self._logprobs) == 3:
                original(self, entry)

        return add

    _replace(SequenceState, "add_logprobs", make)


def _prompt_logprobs_are_a_position_late() -> None:
    def make(original: Any) -> Any:
        def collect(self: Any, batch: Any) -> None:
            batch.prompt_logprobs = [(seq_id, first + (first > 1), entries) for seq_id, first, entries in
                                     batch.prompt_logprobs]  # fmt: skip
            original(self, batch)

        return collect

    _replace(OutputProcessor, "_collect_logprobs", make)


def _a_piece_keeps_the_token_before_it() -> None:
    original = streamed_prompts._longer

    async def longer(streams_: Any, before: Any, made: list[int], piece: Any) -> Any:
        return await original(streams_, before, [*made, made[-1]] if made else made, piece)

    streamed_prompts._longer = longer


def _ranks_that_are_away_are_unknown() -> None:
    def make(original: Any) -> Any:
        def close_ranks(self: RequestTable, dp_ranks: Any, **_: Any) -> None:
            original(self, dp_ranks, for_good=True)

        return close_ranks

    _replace(RequestTable, "close_ranks", make)


def _another_name_counts_as_a_change() -> None:
    def make(original: Any) -> Any:
        def note_version(self: SequenceState, version: Any, start: int) -> bool:
            original(self, version, start)
            return len(self.versions) > 1

        return note_version

    _replace(SequenceState, "note_version", make)


def _requests_go_on_with_other_weights() -> None:
    def make(original: Any) -> Any:
        def note_version(self: SequenceState, version: Any, start: int) -> bool:
            original(self, version, start)
            return False

        return note_version

    _replace(SequenceState, "note_version", make)


def _requests_are_not_checked() -> None:
    _replace(RequestLimits, "check", lambda _: lambda self, *args: None)


def _streams_do_not_see_their_last_output() -> None:
    def make(original: Any) -> Any:
        def taken(self: Any, update: Any) -> Any:
            output = original(self, update)
            if update.error is None:
                self.is_finished = False
            return output

        return taken

    _replace(streams.RequestStream, "_taken", make)


def _salts_are_left_out() -> None:
    _replace(scheduler_request, "root_digest", lambda _: lambda salt: prefix_cache.ROOT_DIGEST)


def _aborts_are_not_told() -> None:
    def make(original: Any) -> Any:
        return lambda self, request_ids, notify=False: original(self, request_ids)

    _replace(EngineClient, "abort", make)


def _prompts_in_pieces_do_not_hear_of_aborts() -> None:
    _replace(ReservedIds, "abort", lambda _: lambda self, request_ids: None)


def _what_can_not_be_read_ends_the_rank() -> None:
    def fail(messages: Any) -> Any:
        raise ValueError("can't be decoded")

    _replace(decoding, "_decode_one_by_one", lambda _: fail)


def _texts_are_sent_as_they_are() -> None:
    _replace(sampling_params, "_json_text", lambda _: lambda name, value: value)


def _new_ids_are_numbers() -> None:
    substitute(ask, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=7)))


def _repetitions_of_one_token_are_not_found() -> None:
    def make(original: Any) -> Any:
        def init(self: RepetitionDetector, params: Any, *args: Any) -> None:
            shortest = max(2, params.min_pattern_size)
            original(
                self, msgspec.structs.replace(params, min_pattern_size=min(shortest, params.max_pattern_size)), *args
            )

        return init

    _replace(RepetitionDetector, "__init__", make)


def _tickets_of_anybody_are_taken() -> None:
    _replace(Tickets, "open", lambda _: lambda self, ticket: RemoteBlocks([], 0))


FAULTS: dict[str, list[Callable[[], None]]] = {
    "adapter": [_moved_requests_lose(lora=None), _a_failed_adapter_takes_others_along],
    "embeddings": [_new_requests_lose(features=[], feature_data=[]),
                   _embeddings_of_the_same_shape_are_taken_for_the_same],
    "constraint": [_moved_requests_lose(structured_outputs=None), _what_cannot_be_compiled_is_accepted],
    "mask": [_masks_are_those_of_the_step_before, _requests_that_go_on_get_no_masks],
    "drafts": [_the_token_after_an_accepted_draft_is_the_draft],
    "pooled": [_new_requests_lose(pooling=None), _results_are_swapped],
    "logprobs": [_new_requests_lose(logprobs=None), _logprobs_come_twice_in_full_batches],
    "prompt logprobs": [_prompt_logprobs_are_a_position_late],
    "hidden states": [_new_requests_lose(return_hidden_states=False, return_prompt_hidden_states=False)],
    "min tokens": [_new_requests_lose(min_tokens=0)],
    "stop tokens": [_new_requests_lose(stop_token_ids=None)],
    "allowed tokens": [_new_requests_lose(allowed_token_ids=None)],
    "bad words": [_new_requests_lose(bad_words_token_ids=[])],
    "cache salt": [_salts_are_left_out],
    "output kind": [_deltas_begin_where_the_last_but_one_ended],
    "added": [_streams_do_not_see_their_last_output],
    "pieces": [_a_piece_keeps_the_token_before_it],
    "refused": [_requests_are_not_checked],
    "rank": [_ranks_that_are_away_are_unknown],
    "slow pieces": [_a_piece_keeps_the_token_before_it],
    "ended by operators": [_aborts_are_not_told],
    "ended between pieces": [_prompts_in_pieces_do_not_hear_of_aborts],
    "odd values": [_what_can_not_be_read_ends_the_rank, _texts_are_sent_as_they_are],
    "repetition": [_repetitions_of_one_token_are_not_found],
    "ticket": [_tickets_of_anybody_are_taken],
    "unnamed": [_new_ids_are_numbers],
    "version change": [_another_name_counts_as_a_change, _requests_go_on_with_other_weights],
}  # fmt: skip
"""By the name of a kind."""
_DEPLOYMENTS = {"ticket": "tickets"}
"""By the name of a kind that plain engines can't have: those that can."""
_KNOWN = {
    ("adapter", 0): 292,
    ("constraint", 0): 131,
    ("constraint", 1): 82,
    ("drafts", 0): 37,
    ("rank", 0): 439,
    ("ended between pieces", 0): 112,
    ("version change", 0): 197,
    ("version change", 1): 88,
}
"""Seeds that have found what few find, by the name of a kind and the number of its fault. They look first."""


def _scenarios(name: str, number: int) -> Iterator[Scenario]:
    """Scenarios with requests of a kind."""
    scenario_in = partial(scenario_of, capability=_DEPLOYMENTS.get(name, PLAIN))
    known = [_KNOWN[name, number]] if (name, number) in _KNOWN else []
    found = (
        scenario
        for scenario in map(scenario_in, itertools.chain(known, itertools.count()))
        if any(kinds.KINDS[name].is_of(each, scenario.options) for each in scenario.requests)
    )
    return itertools.islice(found, _MOST_SEEDS)


def _find(name: str, number: int) -> str | None:
    FAULTS[name][number]()
    return first_find(play, _scenarios(name, number))


def main() -> int:
    names = sys.argv[1:] or list(FAULTS)
    return look_for_all(
        (f"{name} {number}", partial(_find, name, number)) for name in names for number in range(len(FAULTS[name]))
    )


if __name__ == "__main__":
    sys.exit(main())
