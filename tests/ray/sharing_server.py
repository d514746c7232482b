"""A program with one of several engines whose ranks share experts. Its arguments: a checkpoint, and its rank of two.

Prints the tokens of all prompts once it is up. Serves until its standard input ends.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from families import NUM_NEW_TOKENS, prompts

from raycore import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "num_threads": 1,
    "max_num_seqs": 8,
    "block_size": 8,
    "num_gpu_blocks_override": 200,
    "max_num_batched_tokens": 24,
    "dtype": "float32",
    "enable_expert_parallel": True,
    "data_parallel_size": 2,
    "use_tqdm_on_load": False,
}


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts(), PARAMS, use_tqdm=False)]


def main() -> None:
    path, rank = sys.argv[1], int(sys.argv[2])
    with LLM(path, data_parallel_rank=rank, **OPTIONS) as llm:
        print(f"tokens {json.dumps(tokens(llm))}", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
