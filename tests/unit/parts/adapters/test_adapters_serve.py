"""Adapters that requests name: which are found, offered, dropped. Serve's multiplexing has a stand-in."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from raycore.errors import InvalidRequest
from raycore.lora.request import LoRARequest
from raycore.parts.adapters.serve import DynamicAdapters, HeldAdapter, adapter_names
from raycore.parts.adapters.server.adapters import OfferedAdapter, Subscriber
from raycore.serve.config import LoraConfig
from raycore.server.http.errors import APIError


class Started:
    """Adapters that the replica was started with: one."""

    def subscribe(self, subscriber: Subscriber) -> None:
        subscriber([OfferedAdapter(LoRARequest("started", 99, "/started"), "m", 1)])


class Checks:
    def check_new(self, adapter: LoRARequest) -> None:
        if not (Path(adapter.lora_path) / "adapter_model.safetensors").exists():
            raise InvalidRequest(f"{adapter.lora_path} has no tensors")


class Multiplexed:
    """Keeps the two adapters used last."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, HeldAdapter] = OrderedDict()

    def __call__(self, load: Callable[[str], Awaitable[HeldAdapter]]) -> Callable[[str], Awaitable[HeldAdapter]]:
        async def get(name: str) -> HeldAdapter:
            if name not in self.kept:
                if len(self.kept) == 2:
                    _, dropped = self.kept.popitem(last=False)
                    await asyncio.to_thread(dropped.__del__)
                self.kept[name] = await load(name)
            self.kept.move_to_end(name)
            return self.kept[name]

        return get


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b", "c", "broken"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
        if name != "broken":
            (tmp_path / "adapters" / name / "adapter_model.safetensors").write_text(name)
    return tmp_path / "adapters"


class Offers:
    """What requests find."""

    def __init__(self, path: object) -> None:
        self.multiplexed = Multiplexed()
        self.adapters = DynamicAdapters(
            Started(), "m", LoraConfig(dynamic_lora_loading_path=str(path)), Checks(), self.multiplexed
        )
        self.offered: dict[str, LoRARequest] = {}
        self.adapters.subscribe(self._set)

    def _set(self, offered: Any) -> None:
        self.offered = {each.request.lora_name: each.request for each in offered}

    async def use(self, name: str) -> LoRARequest:
        async with self.adapters.offering(name):
            return self.offered[name]


def test_an_adapter_is_offered_until_others_take_its_place(folder):
    async def run() -> None:
        offers = Offers(folder)
        first = await offers.use("m:a")
        assert first.lora_path == str(folder / "a")
        assert await offers.use("m:a") is first
        await offers.use("m:b")
        assert set(offers.offered) == {"started", "m:a", "m:b"}
        await offers.use("m:c")
        await asyncio.sleep(0)
        assert set(offers.offered) == {"started", "m:b", "m:c"}
        # its files may be others by now
        assert (await offers.use("m:a")).lora_int_id != first.lora_int_id

    asyncio.run(run())


def test_an_adapter_that_a_request_uses_is_offered_until_the_request_ends(folder):
    async def run() -> None:
        offers = Offers(folder)
        async with AsyncExitStack() as uses:
            await uses.enter_async_context(offers.adapters.offering("m:a"))
            for name in ("m:b", "m:c"):
                await offers.use(name)
            await asyncio.sleep(0)
            assert set(offers.offered) == {"started", "m:a", "m:b", "m:c"}
        assert set(offers.offered) == {"started", "m:b", "m:c"}

    asyncio.run(run())


@pytest.mark.parametrize("name", ["m:d", "m:", "m:..", "m:a/../a", "m:.", "m:link", "m:a\0"])
def test_an_adapter_that_is_not_there_costs_no_other_its_place(folder, name):
    (folder.parent / "outside").mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (folder.parent / "outside" / file).write_text("{}")
    (folder / "link").symlink_to(folder.parent / "outside")

    async def run() -> None:
        offers = Offers(folder)
        for held in ("m:a", "m:b"):
            await offers.use(held)
        with pytest.raises(APIError) as refused:
            await offers.use(name)
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")
        with pytest.raises(InvalidRequest, match="has no tensors"):
            await offers.use("m:broken")
        assert list(offers.multiplexed.kept) == ["m:a", "m:b"]

    asyncio.run(run())


def test_adapters_elsewhere_are_copied_and_removed(folder):
    pytest.importorskip("pyarrow", reason="needs the extra data")

    async def run() -> None:
        offers = Offers(folder.as_uri())
        copy = Path((await offers.use("m:a")).lora_path)
        assert (copy / "adapter_model.safetensors").read_text() == "a"
        assert copy != folder / "a"
        for name in ("m:b", "m:c"):
            await offers.use(name)
        await asyncio.sleep(0)
        assert not copy.exists()
        with pytest.raises(APIError, match="'m' has no such adapter"):
            await offers.use("m:d")
        offers.adapters.close()
        assert not copy.parent.exists()

    asyncio.run(run())


def test_the_adapters_of_a_folder_are_listed(folder):
    assert adapter_names(str(folder)) == ["a", "b", "broken", "c"]
    assert adapter_names(None) == adapter_names(str(folder / "nowhere")) == []
    pytest.importorskip("pyarrow", reason="needs the extra data")
    assert adapter_names(folder.as_uri()) == ["a", "b", "broken", "c"]
