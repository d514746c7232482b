"""A program that calls its engine in all the ways that an `LLM` has: whichever it is, a prompt gets the same.

Prompts are tokens, texts and conversations. They are continued at once, queued, or added and stepped through, by
several threads, while ranks may be lost. What is refused is named.

`python -m simulation.program calls FIRST_SEED NUM_SEEDS` prints a line for each seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import simulation.installed  # noqa: F401

# isort: split

import numpy as np
from msgspec.structs import replace

from raycore.beam_search import BeamSearchParams
from raycore.client.ask import Ask
from raycore.client.step_queue import StepQueue
from raycore.client.tokenization import Tokenization
from raycore.errors import EngineDeadError, InvalidRequest
from raycore.llm import LLM
from raycore.lora.request import LoRARequest
from raycore.outputs import PoolingRequestOutput
from raycore.parts.pooling.client import pooling_params
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import RequestOutputKind, SamplingParams
from raycore.system import threading, time
from simulation.cluster.accounts.account import ranks_of
from simulation.cluster.accounts.callers import left_by_requests
from simulation.cluster.anywhere import MODEL
from simulation.cluster.driver import OPTIONS
from simulation.cluster.judges import left_by_driver
from simulation.program import PutIn
from simulation.putting_in import substitute
from simulation.ray import api
from simulation.ray.cluster import Cluster
from simulation.ray.faults import FAULTS as BREAKS

_SETTLES_S = 60.0
"""Virtual seconds within which nothing is left of requests."""
_AT_ONCE_S = 0.9
"""Within which a step returns if there is anything to return: it would wait for a second."""
_TEMPLATE = "{% for each in messages %}{{ each['role'] }}: {{ each['content'] }}\n{% endfor %}"
_CLASSES = [5, 9, 70]
"""Tokens whose logits are classes."""
_TEXTS = ["Once there was a queue", "1 + 1 =", "threads, locks and other threads", "a b c d e f g h i j"]


class Program:
    """See the module."""

    def __init__(self, cluster: Cluster, num_ranks: int) -> None:
        self._cluster = cluster
        self._draws = cluster.world.generator("the scenario")
        self._pools = self._draws.random() < 0.2
        self._classifies = self._pools and random.Random(f"classes {cluster.world.seed}").random() < 0.5
        self._breaks = not self._pools and self._draws.random() < 0.4
        api.init()
        self._options = OPTIONS | {"skip_tokenizer_init": False, "data_parallel_size": num_ranks}
        self._options |= {"runner": "pooling"} if self._pools else {"enable_lora": True, "max_loras": 2}
        self._options |= {"pooler_config": {"returned_token_ids": _CLASSES}} if self._classifies else {}
        self._searches = random.Random(f"searches {cluster.world.seed}")
        self._priorities = random.Random(f"priorities {cluster.world.seed}")
        self._is_kept = not self._pools and self._draws.random() < 0.3
        """Whether the engine is one that is kept for who asks again."""
        start: Any = LLM.get_or_create if self._is_kept else LLM
        self._llm: LLM = start(MODEL, use_tqdm_on_load=False, **self._options)
        self._tokenizer = self._llm.get_tokenizer()

    def run(self) -> None:
        if self._pools:
            self._classify() if self._classifies else self._pool()
        else:
            ways = [self._queue, self._step, self._read_texts, self._chat, self._cut, self._add_adapters]
            for way in self._draws.sample(ways, self._draws.randint(2, len(ways))):
                self._cluster.world.tell(f"next: {way.__name__}")
                way()
            if self._searches.random() < 0.3:
                self._search()
        self._make_mistakes()
        self._settle(lambda: _kept(self._llm))
        if self._is_kept:
            self._replace()
        self._llm.shutdown()
        self._settle(lambda: left_by_driver(self._cluster))

    # ---- the ways

    def _queue(self) -> None:
        """Queue requests in two calls, and wait for all."""
        prompts, params = self._some()
        expected = self._expected(prompts, params)
        self._break()
        first = self._draws.randint(0, len(prompts))
        ids = [
            request_id
            for part, own in ((prompts[:first], params[:first]), (prompts[first:], params[first:]))
            for request_id in self._llm.enqueue(part, own, use_tqdm=False, priority=self._some_priority(len(part)))
        ]
        with _refusal("PoolingRequestOutput"):
            self._llm.wait_for_completion(PoolingRequestOutput, use_tqdm=False)
        outputs = self._llm.wait_for_completion(use_tqdm=False)
        assert [each.request_id for each in outputs] == ids
        assert [list(each.outputs[0].token_ids) for each in outputs] == expected
        assert not self._llm.wait_for_completion(use_tqdm=False), "outputs come twice"

    def _step(self) -> None:
        """Add requests on a thread of their own, and step."""
        prompts, params = self._some()
        expected = self._expected(prompts, params)
        is_calm = not self._break()
        engine = self._llm.llm_engine
        kinds = [self._draws.choice(list(RequestOutputKind)) for _ in prompts]
        given_up = {f"step {number}" for number in range(len(prompts)) if self._draws.random() < 0.2}
        pauses_s = [self._draws.choice([0.0, 0.0, 0.02, 0.3]) for _ in prompts]

        def add() -> None:
            for number, (prompt, own, kind) in enumerate(zip(prompts, params, kinds, strict=True)):
                own.output_kind = kind
                engine.add_request(f"step {number}", prompt, own)
                time.sleep(pauses_s[number])
                if f"step {number}" in given_up:
                    engine.abort_request(f"step {number}")

        adding = threading.Thread(target=add, name="adds requests")
        adding.start()
        got: dict[str, list[list[int]]] = {}
        ended: list[str] = []
        while adding.is_alive() or engine.has_unfinished_requests():
            began_s = time.monotonic()
            had_any = engine.has_unfinished_requests()
            outputs = engine.step()
            if is_calm and outputs:
                took_s = time.monotonic() - began_s
                assert not had_any or took_s < _AT_ONCE_S, f"a step with outputs has taken {took_s:.2f} s"
            for output in outputs:
                assert output.request_id not in ended, f"{output.request_id} goes on after its end"
                got.setdefault(output.request_id, []).append(list(output.outputs[0].token_ids))
                if output.finished:
                    ended.append(output.request_id)
            if not outputs:
                time.sleep(0.001)
        adding.join()
        for number, (kind, tokens) in enumerate(zip(kinds, expected, strict=True)):
            name = f"step {number}"
            if name not in given_up:
                assert name in ended, f"{name} has no last output"
                assert _whole(kind, got[name]) == tokens, f"{name}, {kind}: {got[name]}, not {tokens}"

    def _read_texts(self) -> None:
        """Give texts, and have outputs end at some."""
        text = self._draws.choice(_TEXTS)
        params = SamplingParams(max_tokens=self._draws.choice([6, 20, 40]), temperature=0.0, ignore_eos=True)
        prompt = {"prompt_token_ids": self._tokenizer.encode(text)}
        (tokens,) = self._expected([prompt], [params])
        (whole,) = self._generate(text, params)
        assert list(whole.outputs[0].token_ids) == tokens
        written = whole.outputs[0].text
        assert written == self._tokenizer.decode(tokens, skip_special_tokens=True), "the text isn't that of the tokens"
        assert [each.outputs[0].text for each in self._llm.stream(text, params)][-1] == written
        first = self._draws.randrange(max(1, len(written) - 3))
        stop = written[first : first + self._draws.choice([1, 3])]
        if not stop:
            return
        self._break()
        for included in (False, True):
            until = SamplingParams(
                max_tokens=params.max_tokens, temperature=0.0, ignore_eos=True, stop=[stop],
                include_stop_str_in_output=included, logprobs=self._draws.choice([None, 0]),
            )  # fmt: skip
            (output,) = self._generate(text, until)
            (part,) = output.outputs
            end = written.index(stop) + (len(stop) if included else 0)
            assert (part.text, part.finish_reason, part.stop_reason) == (written[:end], "stop", stop), part
            assert tokens[: len(part.token_ids)] == list(part.token_ids)
            assert part.logprobs is None or len(part.logprobs) == len(part.token_ids)

    def _search(self) -> None:
        """Search for the most likely continuations: of one beam, it is what is most likely token by token."""
        draw, prompts = self._searches, [{"prompt_token_ids": [7 + each] * 9} for each in range(3)]
        count = draw.choice([1, 4, 9])
        greedy = self._expected(
            prompts, [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for _ in prompts]
        )
        params = BeamSearchParams(draw.choice([2, 3]), count, ignore_eos=True)
        for width, limit in ((1, None), (1, 2)):
            one = replace(params, beam_width=width)
            outputs = self._llm.beam_search(prompts, one, concurrency_limit=limit)
            assert [list(each.sequences[0].tokens[9:]) for each in outputs] == greedy, "a beam isn't the likeliest"
        together = self._llm.beam_search(prompts, params)
        for prompt, own in zip(prompts, together, strict=True):
            (alone,) = self._llm.beam_search(prompt, params)
            assert [each.tokens for each in own.sequences] == [each.tokens for each in alone.sequences]
            scores = [each.cum_logprob for each in own.sequences]
            assert len(scores) == params.beam_width
            assert scores == sorted(scores, reverse=True), "the best one isn't the first one"

    def _chat(self) -> None:
        """Hold conversations: each is its template's text."""
        talks = [[{"role": "user", "content": self._draws.choice(_TEXTS)}] for _ in range(self._draws.randint(1, 3))]
        params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        texts = [f"user: {talk[0]['content']}\n" for talk in talks]
        plain = self._generate(texts, params, tokenization_kwargs={"add_special_tokens": False})
        for chatted in (
            self._llm.chat(talks, params, use_tqdm=False, chat_template=_TEMPLATE),
            self._queued_chat(talks, params),
        ):
            assert [each.prompt_token_ids for each in chatted] == [each.prompt_token_ids for each in plain]
            assert [each.outputs[0].token_ids for each in chatted] == [each.outputs[0].token_ids for each in plain]

    def _queued_chat(self, talks: list[Any], params: SamplingParams) -> list[Any]:
        self._llm.enqueue_chat(talks, params, chat_template=_TEMPLATE)
        return self._llm.wait_for_completion(use_tqdm=False)

    def _cut(self) -> None:
        """Have prompts cut."""
        prompts, params = self._some()
        number, side = self._draws.choice([1, 3, 300 - 44]), self._draws.choice(["left", "right"])
        how = {"truncate_prompt_tokens": number, "truncation_side": side}
        cut = [
            {"prompt_token_ids": ids[-number:] if side == "left" else ids[:number]}
            for ids in (prompt["prompt_token_ids"] for prompt in prompts)
        ]
        outputs = self._generate(prompts, params, tokenization_kwargs=how)
        for output, prompt in zip(outputs, cut, strict=True):
            left = output.prompt_token_ids
            assert left == prompt["prompt_token_ids"], f"a prompt was cut to {left}, and not on the {side} to {number}"
        assert [list(each.outputs[0].token_ids) for each in outputs] == self._expected(cut, params)

    def _add_adapters(self) -> None:
        """Add adapters, whose names and numbers have to be their own."""
        llm, first = self._llm, LoRARequest("first", 1, "/adapters/1")
        assert llm.add_lora(first)
        assert not llm.add_lora(first), "it is there"
        for said, other in {
            "1 is the number of 'first'": LoRARequest("second", 1, "/adapters/1"),
            "'first' was added with lora_int_id=1, not with 2": LoRARequest("first", 2, "/adapters/1"),
            "1 was added from /adapters/1, not from /adapters/2": LoRARequest("first", 1, "/adapters/2"),
        }.items():
            with _refusal(said):
                llm.add_lora(other)
        assert llm.list_loras() == {1}
        assert llm.remove_lora(1)
        assert not llm.remove_lora(1), "it is gone"

    def _replace(self) -> None:
        """Ask for the engine again, and for one with other options, while another thread waits for outputs."""
        params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
        heard: list[BaseException] = []

        def wait() -> None:
            try:
                self._generate({"prompt_token_ids": [5]}, params)
            except EngineDeadError as error:
                heard.append(error)

        assert LLM.get_or_create(MODEL, use_tqdm_on_load=False, **self._options) is self._llm
        waiting = threading.Thread(target=wait, name="waits")
        waiting.start()
        while not self._llm.num_unfinished_requests:
            time.sleep(0.001)
        self._llm = LLM.get_or_create(MODEL, use_tqdm_on_load=False, **self._options | {"max_num_seqs": 3})
        waiting.join()
        assert "get_or_create() replaced it" in str(heard), f"who waited for the replaced engine has heard {heard}"
        self._generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=2))

    def _pool(self) -> None:
        """Ask for embeddings, in each way that there is."""
        texts = self._draws.sample(_TEXTS, self._draws.randint(2, 4))
        embedded = [np.array(each.outputs.embedding) for each in self._llm.embed(texts, use_tqdm=False)]
        tokens = [{"prompt_token_ids": self._tokenizer.encode(text)} for text in texts]
        ids = [self._add_pooled(number, prompt) for number, prompt in enumerate(tokens)]
        outputs: dict[str, Any] = {}
        while self._llm.llm_engine.has_unfinished_requests():
            outputs |= {each.request_id: each for each in self._llm.llm_engine.step()}
        for request_id, own in zip(ids, embedded, strict=True):
            np.testing.assert_array_equal(np.array(outputs[request_id].outputs.data), own)
        scores = [each.outputs.score for each in self._llm.score(texts[0], texts[1:], use_tqdm=False)]
        cosines = [own @ embedded[0] / np.linalg.norm(own) / np.linalg.norm(embedded[0]) for own in embedded[1:]]
        np.testing.assert_allclose(scores, cosines, rtol=1e-4, atol=1e-5)

    def _classify(self) -> None:
        """Ask for classes, all of them or only some."""
        texts = self._draws.sample(_TEXTS, self._draws.randint(1, 4))
        wholes = self._classes_of(texts, _CLASSES)
        asked = [self._draws.choice(_CLASSES) for _ in range(self._draws.randint(1, 3))]
        for whole, some in zip(wholes, self._classes_of(texts, asked), strict=True):
            assert some == [whole[_CLASSES.index(each)] for each in asked], f"asked for the classes {asked}"

    def _classes_of(self, texts: list[str], classes: list[int]) -> list[list[float]]:
        params = PoolingParams(returned_token_ids=classes)
        outputs = self._llm.encode(texts, params, pooling_task="token_classify", use_tqdm=False)
        return [np.array(each.outputs.data).tolist() for each in outputs]

    def _add_pooled(self, number: int, prompt: Any) -> str:
        return self._llm.llm_engine.add_request(f"pooled {number}", prompt, PoolingParams(task="embed"))

    def _make_mistakes(self) -> None:
        llm, engine = self._llm, self._llm.llm_engine
        task: Any = "classify" if self._classifies else "embed"
        params: Any = PoolingParams(task=task) if self._pools else SamplingParams(max_tokens=2)
        mistakes: dict[str, Callable[[], object]] = {
            "empty string": lambda: engine.add_request("mistake", "", params),
            "'red'": lambda: engine.add_request("mistake", "text", params, tokenization_kwargs={"red": 1}),
            "truncate_prompt_tokens=0": lambda: engine.add_request(
                "mistake", "text", params, tokenization_kwargs={"truncate_prompt_tokens": 0}
            ),
            "params='red'": lambda: engine.add_request("mistake", "text", "red"),  # type: ignore[arg-type]
            "surrogate": lambda: engine.add_request("mistake", "\ud800", params),
            "request_id=7": lambda: engine.add_request(7, "text", params),  # type: ignore[arg-type]
            "lora_request=7": lambda: llm.add_lora(7),  # type: ignore[arg-type]
        }
        if self._classifies:
            wrong: dict[str, Any] = {"[] isn't a list": [], "'red' isn't a list": "red", "2, which isn't": [5, 2]}
            mistakes |= {
                said: lambda given=given: llm.encode(
                    "text", PoolingParams(returned_token_ids=given), pooling_task="token_classify", use_tqdm=False
                )
                for said, given in wrong.items()
            }
        elif self._pools:
            mistakes |= {
                "'red'": lambda: llm.encode("text", pooling_task="red", use_tqdm=False),  # type: ignore[arg-type]
                "'classify'": lambda: llm.classify("text", use_tqdm=False),
                "2 pooling_params for 1": lambda: llm.embed(
                    "text", pooling_params=[PoolingParams(), PoolingParams()], use_tqdm=False
                ),
            }
        else:
            mistakes |= {
                f"priority={each!r}": lambda each=each: llm.enqueue("text", params, priority=each)
                for each in ("red", b"12", 7.5)
            }
            mistakes["3 priorities for 1"] = lambda: llm.enqueue("text", params, priority=[1, 2, 3])
        for said, mistake in mistakes.items():
            with _refusal(said):
                mistake()
        assert not engine.has_unfinished_requests()
        engine.add_request("first", "text", params)
        with _refusal("'first' is already in use"):
            engine.add_request("first", "text", params)
        while engine.has_unfinished_requests():
            engine.step()

    # ---- what they have in common

    def _some(self) -> tuple[list[Any], list[SamplingParams]]:
        """Prompts, and what is asked for each."""
        draws = self._draws
        prompts = [
            {"prompt_token_ids": [draws.randrange(3, 200) for _ in range(draws.choice([1, 9, 30]))]}
            for _ in range(draws.choice([1, 3, 6]))
        ]
        params = [
            SamplingParams(max_tokens=draws.choice([1, 5, 20]), temperature=0.0, ignore_eos=True) for _ in prompts
        ]
        return prompts, params

    def _some_priority(self, count: int) -> Any:
        """One for all, one for each, or none."""
        return self._priorities.choice([None, 0, [0] * count, tuple([0] * count)])

    def _generate(self, prompts: Any, params: Any, **more: Any) -> list[Any]:
        return self._llm.generate(prompts, params, use_tqdm=False, **more)

    def _expected(self, prompts: list[Any], params: list[SamplingParams]) -> list[list[int]]:
        return [list(each.outputs[0].token_ids) for each in self._generate(prompts, params)]

    def _break(self) -> bool:
        """Perhaps let a rank be lost from now on. Returns whether one is."""
        live = [process for _, process, _ in ranks_of(self._llm)]
        if not self._breaks or not live or self._draws.random() < 0.5:
            return False
        victim = self._draws.choice(live)
        at_s, draws = self._draws.uniform(0.0, 0.2), random.Random(self._draws.random())

        def kill() -> None:
            if not victim.has_ended:
                BREAKS["its process is killed"](self._cluster, victim, draws)

        self._cluster.world.call_later(at_s, kill)
        return True

    def _settle(self, wrong: Callable[[], Iterator[str]]) -> None:
        """Wait until nothing is wrong any more. Raises AssertionError with what stays so."""
        until_s = time.monotonic() + _SETTLES_S
        while left := list(wrong()):
            assert time.monotonic() < until_s, "; ".join(left)
            time.sleep(1.0)


def _whole(kind: RequestOutputKind, got: list[list[int]]) -> list[int]:
    """All tokens of a request, of what steps have returned."""
    if kind is RequestOutputKind.DELTA:
        return [token for part in got for token in part]
    if kind is RequestOutputKind.FINAL_ONLY:
        assert len(got) == 1, "several outputs, and only the last one was asked for"
    assert all(later[: len(part)] == part for part, later in pairwise(got))
    return got[-1]


class _refusal:  # noqa: N801 - it reads as a function
    """Within the block, something is refused with a message that has this text."""

    def __init__(self, said: str) -> None:
        self._said = said

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        assert error is not None, f"nothing was refused with {self._said!r}"
        return isinstance(error, InvalidRequest) and self._said in str(error)


def _kept(llm: LLM) -> Iterator[str]:
    """What an engine without requests keeps."""
    yield from left_by_requests(llm)
    queue = llm._queue
    for what, value in ("requests", queue._kinds), ("outputs", queue._updates), ("errors", queue._errors):
        if value:
            yield f"the client keeps queued {what}: {value}"


def main(cluster: Cluster, num_ranks: int) -> None:
    """See the module."""
    Program(cluster, min(num_ranks, 2)).run()


# ---- faults that are put in


def _steps_are_not_woken() -> None:
    original = StepQueue.__init__

    def init(self: StepQueue, client: Any) -> None:
        original(self, client)
        self._changed.notify_all = lambda: None

    substitute(StepQueue, "__init__", init)


def _prompts_are_cut_on_the_other_side() -> None:
    original = Tokenization.cut

    def cut(self: Tokenization, token_ids: list[int], tokenizer: Any) -> list[int]:
        other = Tokenization(self.max_tokens, "right" if self.side == "left" else "left", self.add_special_tokens)
        return original(other, token_ids, tokenizer)

    substitute(Tokenization, "cut", cut)


def _a_queued_request_may_be_added_twice() -> None:
    original = StepQueue.add

    def add(self: StepQueue, asks: Sequence[Ask]) -> None:
        used = self._kinds
        names = [f"{ask.request_id}+" if ask.request_id in used else ask.request_id for ask in asks]
        original(self, [replace(ask, request_id=name) for ask, name in zip(asks, names, strict=True)])

    substitute(StepQueue, "add", add)


def _classes_come_in_another_order() -> None:
    original = pooling_params._returned_token_ids
    substitute(pooling_params, "_returned_token_ids", lambda *args: sorted(original(*args) or ()) or None)


FAULTS = [
    PutIn(_steps_are_not_woken, 6, "waited 1.000 s in step"),
    PutIn(_prompts_are_cut_on_the_other_side, 2, "a prompt was cut to"),
    PutIn(_a_queued_request_may_be_added_twice, 0, "nothing was refused with \"'first' is already in use\""),
    PutIn(_classes_come_in_another_order, 29, "asked for the classes"),
]
