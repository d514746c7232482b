"""LoRA adapters that come and go while an engine is disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from raycore import AsyncLLM, LoRARequest, SamplingParams
from raycore.errors import InvalidInput

_PROMPT = "27 + 58 ="
_INTERVAL_S = 0.2


class AdapterChurn:
    """Adds an adapter that no request uses, and removes it, again and again. So others are evicted and read again."""

    def __init__(self, llm: AsyncLLM, adapter: LoRARequest | None) -> None:
        """`adapter`: None does nothing."""
        self.num_added = 0
        self.num_refused = 0
        """How often there was no slot for it, or the engine was asleep."""
        self._llm = llm
        self._adapter = adapter

    async def run(self, is_over: asyncio.Event) -> None:
        """Go on until `is_over`."""
        while self._adapter is not None and not is_over.is_set():
            try:
                await self._llm.add_lora(self._adapter)
            except InvalidInput as error:
                if "slots for adapters are taken" not in str(error) and "asleep" not in str(error):
                    raise
                self.num_refused += 1
            else:
                self.num_added += 1
                await self._llm.remove_lora(self._adapter.lora_int_id)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(is_over.wait(), _INTERVAL_S)


async def add_and_compare(llm: AsyncLLM, adapters: Sequence[LoRARequest]) -> None:
    """Add every other adapter, the first one pinned. The others come with requests only.

    Raises RuntimeError if two adapters give the same tokens, because a mistaken adapter wouldn't be noticed then.
    """
    for adapter in adapters[::2]:
        await llm.add_lora(adapter)
    if adapters:
        await llm.pin_lora(adapters[0].lora_int_id)
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=50, ignore_eos=True)
    found: set[tuple[float, ...]] = set()
    for adapter in (None, *adapters):
        if llm.pooling_spec is not None:
            async for pooled in llm.encode(_PROMPT, lora_request=adapter):
                found.add(tuple(pooled.outputs.data.tolist()))
            continue
        async for output in llm.generate(_PROMPT, params, stream=False, lora_request=adapter):
            found.add(tuple(output.outputs[0].token_ids))
    if len(found) <= len(adapters):
        raise RuntimeError(f"{len(adapters)} adapters and the model itself give only {len(found)} different outputs")
