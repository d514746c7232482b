"""The requests that a seed draws: of all kinds, with prefixes that some share."""

from __future__ import annotations

import random
from typing import Any

from raycore.lora.request import LoRARequest
from raycore.messages import EngineRequest, Feature, FeatureData
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams
from raycore.structured_outputs import StructuredOutputsParams
from simulation.engine.options import EOS, MAX_MODEL_LEN, Options
from simulation.worker.preparation import BROKEN

_LONGEST = 60


class Requests:
    """See the module."""

    def __init__(self, options: Options, draw: random.Random) -> None:
        self._options, self._draw = options, draw
        self._vocab_size = options.config.model.spec.vocab_size
        self._bases = [[self._token() for _ in range(_LONGEST)] for _ in range(3)]
        self._num_made = 0

    def some(self) -> list[EngineRequest]:
        """What a caller sends in one message: one sequence, or several of the same prompt."""
        draw, config = self._draw, self._options.config
        self._num_made += 1
        kind = ""
        prompt = draw.choice(self._bases)[: draw.randrange(_LONGEST)]
        prompt = prompt + [self._token() for _ in range(draw.choice([0, 1, 4, 20]))]
        prompt = prompt[: MAX_MODEL_LEN - 20] or [1]
        own: dict[str, Any] = {"eos_token_ids": [EOS], "priority": draw.randrange(3)}
        params = {} if self._options.pools else self._params()
        salt = draw.choice([None, None, None, "a", "b"])
        if salt is not None:
            own["cache_salt"] = salt
            params["extra_args"] = {"salt": salt}
        if config.lora.enable_lora and draw.random() < 0.5:
            own["lora"] = self._adapter()
            kind = "failed" if BROKEN in own["lora"].lora_path else ""
        if config.model.enable_prompt_embeds and draw.random() < 0.5:
            own["features"], own["feature_data"] = self._features(len(prompt))
        if self._options.pools:
            own["pooling"] = PoolingParams(task="embed")
        if draw.random() < 0.02:
            prompt[-1], kind = self._vocab_size, "error"
        return [
            EngineRequest(
                0,
                f"{self._num_made}.{index}{kind}",
                list(prompt),
                SamplingParams(**params),
                draw.getrandbits(62),
                **own,
            )
            for index in range(draw.choice([1, 1, 1, 2, 4]))
        ]

    def _params(self) -> dict[str, Any]:
        draw = self._draw
        params: dict[str, Any] = {
            "temperature": draw.choice([0.0, 1.0]),
            "max_tokens": draw.choice([1, 2, 8, 20, None]),
            "ignore_eos": draw.random() < 0.5,
        }
        which = draw.random()
        if which < 0.1:
            texts = [[self._token_but_eos() for _ in range(draw.randrange(1, 6))] for _ in range(3)]
            params["structured_outputs"] = StructuredOutputsParams(choice=[" ".join(map(str, text)) for text in texts])
            params["ignore_eos"] = False
        elif which < 0.2:
            params["logprobs"] = draw.randrange(3)
        elif which < 0.3:
            params["prompt_logprobs"] = draw.randrange(3)
        elif which < 0.35:
            params["min_tokens"] = draw.randrange(1, 9)
            params["max_tokens"] = 20
        elif which < 0.4:
            params["allowed_token_ids"] = [self._token() for _ in range(4)]
        elif which < 0.45:
            params["stop_token_ids"] = [self._token_but_eos()]
        return params

    def _adapter(self) -> LoRARequest:
        number = self._draw.randrange(1, 6)
        folder = BROKEN if number == 5 else "adapters"
        return LoRARequest(f"adapter {number}", number, f"{folder}/{number}")

    def _features(self, num_prompt: int) -> tuple[list[Feature], list[FeatureData | None]]:
        features: list[Feature] = []
        data: list[FeatureData | None] = []
        position = 0
        while (position := position + self._draw.randrange(8)) < num_prompt and len(features) < 3:
            number = self._draw.randrange(12)
            num_tokens = 1 + number * 3
            if position + num_tokens > num_prompt:
                break
            content = f"feature {number}".encode()
            features.append(Feature(content.decode(), position, num_tokens))
            data.append(FeatureData(content, [len(content)], "uint8"))
            position += num_tokens
        return features, data

    def _token(self) -> int:
        return self._draw.randrange(self._vocab_size)

    def _token_but_eos(self) -> int:
        return self._draw.choice([token for token in range(self._vocab_size) if token != EOS])
