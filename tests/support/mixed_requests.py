"""Requests that ask for all kinds of things, and what an engine without Ray makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sampling_values import CHANGING_DRAWS
from waiting import eventually

from raycore.config import resolve
from raycore.demo import demo_model_path
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.lora.request import LoRARequest
from raycore.messages import EngineRequest, LoadView
from raycore.sampling_params import SamplingParams
from raycore.structured_outputs import StructuredOutputsParams
from raycore.text.tokenizer import Tokenizer
from raycore.worker.rank import RankIdentity

TOKENS = Tokenizer.from_dir(demo_model_path())
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "return_hidden_states": True},
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1},
    {"temperature": 1.2, "repetition_penalty": 1.3},
    {
        "temperature": 0,
        "repetition_penalty": 1.5,
        "return_hidden_states": True,
        "return_prompt_hidden_states": True,
    },
    {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "min_tokens": 9},
    {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex="([a-z]{2,9} ){40}")},
    {"temperature": 0, "structured_outputs": StructuredOutputsParams(json_object=True), "logprobs": 1},
    {"temperature": 1.0, "logit_bias": {5: 4.0, 9: -4.0}, "stop_token_ids": [20, 21]},
    {"temperature": 1.0, "allowed_token_ids": list(range(30, 60))},
]
_IN_KINDS = {name for kind in KINDS for name in kind}
KINDS[3] |= {name: value for name, value in CHANGING_DRAWS.items() if name not in _IN_KINDS}
SEVERAL_TOKENS = [[TOKENS.encode("7")[-1], TOKENS.encode("8")[-1]], [TOKENS.encode("1")[-1]]]
"""Two bad words: one of two tokens, which needs the output, and one of a single token."""


def make_requests() -> list[EngineRequest]:
    return [
        EngineRequest(
            seq_id,
            str(seq_id),
            TOKENS.encode("37 + 58 = " * (1 + seq_id % 5) + f"{seq_id} + 4 ="),
            SamplingParams(max_tokens=20 + 3 * (seq_id % 7), **KINDS[seq_id % len(KINDS)]),
            seed=seq_id,
            eos_token_ids=[0, 3],
            bad_words_token_ids=SEVERAL_TOKENS if seq_id % 4 == 1 else [],
        )
        for seq_id in range(30)
    ]


def prepare(core: EngineCore) -> None:
    """Wait until the grammars and adapters of all requests are there."""

    def is_ready() -> bool:
        assert not core.release_prepared()
        return not any(part.is_preparing() for part in core.parts)

    eventually(is_ready)


def run(
    aborted_at: dict[int, int],
    model: str | Path | None = None,
    adapters: Sequence[LoRARequest | None] = (None,),
    **options: Any,
) -> tuple[dict[int, Any], LoadView]:
    """What each request comes to, by seq_id, and the engine's load at the end.

    Args:
        aborted_at: by seq_id, the number of tokens after which a request is aborted.
        model: None: the demo model.
        adapters: those of the requests, in turn.
    """
    config = resolve(model or demo_model_path(), num_threads=1, max_model_len=256, **options)
    core = EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))
    requests = make_requests()
    outputs: dict[int, Any] = {
        request.seq_id: {"tokens": [], "logprobs": [], "values": [], "prompt_logprobs": [], "end": None}
        for request in requests
    }
    states: dict[int, dict[int, float]] = {seq_id: {} for seq_id in outputs}
    """By position: a number that differs from hidden state to hidden state."""
    most_in_flight = 0
    for request in requests:
        request.lora = adapters[request.seq_id % len(adapters)]
        core.submit(request)
    prepare(core)  # else the time that it takes decides who is preempted
    while core.has_work():
        step = core.step()
        most_in_flight = max(most_in_flight, len(core._in_flight) + (step is not None))
        if step is None:
            continue
        for seq_id, token in zip(step.seq_ids.tolist(), step.token_ids.tolist(), strict=True):
            outputs[seq_id]["tokens"].append(token)
        for seq_id, entry in step.logprobs:
            outputs[seq_id]["logprobs"].append(entry.token_ids)
            outputs[seq_id]["values"] += entry.logprobs
        for seq_id, position, entries in step.prompt_logprobs:
            assert position == len(outputs[seq_id]["prompt_logprobs"]) + 1
            outputs[seq_id]["prompt_logprobs"] += [entry.token_ids for entry in entries]
        for seq_id, report in step.reports:
            each_state = np.frombuffer(report.data, np.float32).reshape(report.num_tokens, -1)
            for position, state in enumerate(each_state, start=report.position):
                states[seq_id].setdefault(position, float(state.std()))
        for end in step.finished:
            outputs[end.seq_id]["end"] = end[1:]
        core.abort([i for i, num in aborted_at.items() if len(outputs[i]["tokens"]) >= num and not outputs[i]["end"]])
        core.scheduler.check_integrity()
    assert most_in_flight == config.max_steps_in_flight
    load = core.load()
    core.shutdown()
    for request in requests:
        output, own = outputs[request.seq_id], states[request.seq_id]
        output["values"] += [own[position] for position in positions_with_states(request, len(output["tokens"]))]
    return outputs, load


def positions_with_states(request: EngineRequest, num_output: int) -> range:
    """Those at which the request gets hidden states: of its prompt, and those that output tokens are sampled from."""
    num_prompt, params = len(request.prompt_token_ids), request.params
    end = num_prompt + num_output - 1 if params.return_hidden_states else num_prompt
    start = 0 if params.return_prompt_hidden_states else num_prompt - params.return_hidden_states
    return range(start, end)
