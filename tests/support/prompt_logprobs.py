"""The log probabilities of the tests' prompts, as a whole engine computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from families import prompts

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity


def prompt_logprobs(path: Path, **options: Any) -> torch.Tensor:
    """Those of all prompts' tokens, computed in float32. `options`: of the engine of the model at `path`."""
    config = resolve(path, dtype="float32", num_threads=1, max_num_seqs=8, **options)
    core = EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))
    for seq_id, prompt in enumerate(prompts()):
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        core.submit(EngineRequest(seq_id, str(seq_id), prompt, params, seed=0))
    found: dict[tuple[int, int], float] = {}
    while core.has_work():
        step = core.step()
        for seq_id, start, entries in [] if step is None else step.prompt_logprobs:
            found |= {(seq_id, start + at): entry.logprobs[0] for at, entry in enumerate(entries)}
    core.shutdown()
    return torch.tensor([found[key] for key in sorted(found)])
