"""Engines to which callers come back with the same long prompts while they are idle, and in which nothing breaks.

Where a request goes then is a matter of what is cached. Some prompts have the same tokens, and other embeddings or
another salt: they share nothing.
"""

from __future__ import annotations

import random
from typing import Any

from msgspec.structs import replace

from simulation.cluster.deployments.deployment import Deployment
from simulation.scenario import Request

_APART_S = 2.5
"""Virtual seconds between two requests: so long after the last one has ended, each rank has said that it is idle."""


def drawn(draw: random.Random) -> Deployment:
    prompts = [prompt for number in range(draw.choice([1, 2])) for prompt in _prompts(draw, number)]
    together = [replace(each, at_s=round(draw.uniform(0.0, 0.02), 4)) for each in prompts]
    returns = [
        replace(draw.choice(prompts), at_s=round((1 + index) * _APART_S + draw.uniform(0.0, 0.5), 4))
        for index in range(draw.choice([4, 6, 8]))
    ]
    return Deployment(
        {
            "enable_prompt_embeds": True,
            "enable_prefix_caching": True,
            # so few that a request is preempted where two are long
            "num_gpu_blocks_override": draw.choice([256, 34]),
        },
        num_ranks=draw.choice([2, 3]),
        requests=(*together, *returns),
    )


def _prompts(draw: random.Random, number: int) -> list[Request]:
    """A few requests with prompts of the same tokens."""
    num_tokens, way = draw.choice([90, 140, 190]), draw.choice(["plain", "cache salt", "embeddings"])
    plain = Request(at_s=0.0, prompt=((2000 + number, num_tokens),), max_tokens=draw.choice([4, 16, 48]))
    wants: list[dict[str, Any]] = [{}]
    if way == "cache salt":
        wants += [{way: "a"}, {way: "b"}]
    elif way == "embeddings":
        position, kind = draw.randrange(4), draw.choice([1, 2])
        # of these numbers, two have as many tokens
        wants = [{way: [[position, 1 + 8 * kind, each]]} for each in (kind, kind + 4)]
    return [replace(plain, wants=each) for each in wants]
