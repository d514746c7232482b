"""A layer of the target that predicts further tokens drafts what transformers' code of such a layer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from families import prompts
from mtp_checkpoints import MTP_FAMILIES, MtpCheckpoint
from native_kernels import needs_kernels

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

NUM_NEW = 12
NUM_DRAFTED = 3


class Drafted(NamedTuple):
    """What was drafted when some tokens were known."""

    known: list[int]
    draft: list[int]


@pytest.fixture(scope="module", params=MTP_FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MtpCheckpoint:
    return MtpCheckpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


def drafts_for(path: Path, prompt: list[int], **options: Any) -> list[Drafted]:
    """The drafts of an engine with one request."""
    always = {"num_speculative_tokens": NUM_DRAFTED, "num_speculative_tokens_per_batch_size": [(1, 4, NUM_DRAFTED)]}
    sizes = {"num_threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 24, "block_size": 8}
    config = resolve(path, dtype="float32", speculative_config={"method": "mtp"} | always, **sizes, **options)
    executor = InlineExecutor(config, RankIdentity(0, 1))
    take, known, found = executor.take_draft_token_ids, list(prompt), list[Drafted]()

    def noting(slots: list[int], num_tokens: list[int]) -> list[list[int]]:
        drafts = take(slots, num_tokens)
        found.append(Drafted(list(known), drafts[0]))
        return drafts

    executor.take_draft_token_ids = noting
    core = EngineCore(config, executor)
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    core.submit(EngineRequest(0, "0", prompt, params, seed=0))
    while core.has_work():
        step = core.step()
        if step is not None:
            known += step.token_ids.tolist()
    core.shutdown()
    return found


@pytest.mark.parametrize("backend", ["torch", pytest.param("auto", marks=needs_kernels)])
def test_drafts_are_those_of_transformers_layer(checkpoint: MtpCheckpoint, backend: str) -> None:
    for prompt in prompts()[2:5]:
        found = drafts_for(checkpoint.path, prompt, attention_backend=backend)
        assert len(found) >= NUM_NEW // (1 + NUM_DRAFTED)
        assert [draft for _, draft in found] == [checkpoint.drafts(known, len(draft)) for known, draft in found]
