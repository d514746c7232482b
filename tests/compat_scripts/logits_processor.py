"""A processor of the script's own, which leaves one token of requests that ask for it."""

import os

import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality


class OneToken(LogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self.wanted = {}

    @classmethod
    def validate_params(cls, params: SamplingParams):
        token = (params.extra_args or {}).get("token")
        if token is not None and not isinstance(token, int):
            raise ValueError(f"token={token!r} isn't a token id")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None):
        if batch_update is None:
            return
        for index, params, _, _ in batch_update.added:
            self.wanted.pop(index, None)
            token = (params.extra_args or {}).get("token")
            if token is not None:
                self.wanted[index] = token
        for index in batch_update.removed:
            self.wanted.pop(index, None)
        for source, target, direction in batch_update.moved:
            moved, other = self.wanted.pop(source, None), self.wanted.pop(target, None)
            if moved is not None:
                self.wanted[target] = moved
            if direction == MoveDirectionality.SWAP and other is not None:
                self.wanted[source] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, token in self.wanted.items():
            kept = logits[row, token].clone()
            logits[row] = float("-inf")
            logits[row, token] = kept
        return logits


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256, logits_processors=[OneToken])
    outputs = llm.generate(
        ["27 + 58 ="] * 2,
        [
            SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args={"token": 45}),
            SamplingParams(temperature=0, max_tokens=8),
        ],
    )
    assert list(outputs[0].outputs[0].token_ids) == [45] * 4
    assert outputs[1].outputs[0].text.strip() == "85"


if __name__ == "__main__":
    main()
