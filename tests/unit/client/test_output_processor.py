from itertools import pairwise

import numpy as np
import pytest
from asks import checked

from raycore.client.output_processor import OutputProcessor
from raycore.errors import InvalidRequest, RequestFailed
from raycore.messages import FinishedRequest, OutputBatch, TokenLogprobs
from raycore.outputs import FlatLogprobs
from raycore.sampling_params import SamplingParams

PROMPT = [5, 6, 7]


def batch(tokens=(), finished=(), **kwargs):
    """`tokens` are (seq_id, token id) pairs, `finished` (seq_id, reason[, stop reason]) tuples."""
    seq_ids, ids = zip(*tokens, strict=True) if tokens else ((), ())
    return OutputBatch(
        seq_ids=np.array(seq_ids, np.int64).tobytes(),
        token_ids=np.array(ids, np.int32).tobytes(),
        steps=[(1, 0.0, 0.01)] * len(ids),
        finished=[FinishedRequest(*end) for end in finished],
        **kwargs,
    )


@pytest.fixture
def assembler(tokenizer):
    return OutputProcessor(tokenizer)


def add(assembler, seq_ids=(1,), stream=False, request_id="r", **params):
    params = SamplingParams(n=len(seq_ids), **params)
    assembler.add(checked(request_id, PROMPT, params, text="prompt", stream=stream), list(seq_ids))


def test_a_request_that_does_not_stream_is_reported_once_at_its_end(assembler, tokenizer):
    add(assembler)
    ids = tokenizer.encode("Hello, world!")
    assert assembler.process(batch([(1, i) for i in ids[:-1]], started=[(1, 2)])).updates == []
    step = assembler.process(batch([(1, ids[-1])], [(1, "length")]))
    [update] = step.updates
    request_id, output, error = update.request_id, update.output, update.error
    assert (request_id, error, step.aborts) == ("r", None, [])
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "prompt", PROMPT)
    assert output.finished
    assert output.num_cached_tokens == 2
    assert list(output.metrics) == ["arrival_s", "first_token_s", "last_token_s", "finished_s"]
    [completion] = output.outputs
    assert (completion.text, completion.token_ids) == ("Hello, world!", ids)
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert completion.logprobs is completion.cumulative_logprob is None
    assert len(assembler) == 0


def test_a_streaming_request_is_reported_whenever_it_has_new_text(assembler, tokenizer):
    add(assembler, stream=True)
    add(assembler, [2], request_id="other")
    ids = tokenizer.encode("the fox 你")
    seen = []
    for i, token_id in enumerate(ids):
        end = [(1, "length")] if i == len(ids) - 1 else []
        step = assembler.process(batch([(2, 9), (1, token_id)], end))
        [update] = step.updates
        assert update.request_id == "r"
        output = update.output
        assert output.outputs[0].token_ids == ids[: i + 1]
        seen.append(output.outputs[0].text)
    assert seen[-1] == "the fox 你"
    assert all(later.startswith(earlier) for earlier, later in pairwise(seen))
    assert not any("\ufffd" in text for text in seen)
    assert assembler.process(batch([(2, 9)])).updates == []


def test_a_request_that_streams_text_is_not_reported_for_tokens_without_text(assembler, tokenizer):
    add(assembler, stream="text")
    ids = [0, *tokenizer.encode("a 你"), 0, *tokenizer.encode("b"), 0, 0]  # 0 is special, and 你 takes several tokens
    seen = []
    for i, token_id in enumerate(ids):
        end = [(1, "length")] if i == len(ids) - 1 else []
        for update in assembler.process(batch([(1, token_id)], end)).updates:
            completion = update.output.outputs[0]
            assert completion.token_ids == ids[: i + 1]
            seen.append(completion.text)
    plain = OutputProcessor(tokenizer)
    add(plain, stream=True)
    told = [plain.process(batch([(1, token_id)])).updates[0].output.outputs[0].text for token_id in ids]
    assert seen == [*dict.fromkeys(told), told[-1]]  # the first output has no text, and the last one nothing new
    assert len(seen) < len(told)


def test_text_that_may_begin_a_stop_string_is_no_new_text(assembler, tokenizer):
    add(assembler, stream="text", stop=["ab!"])
    seen = [assembler.process(batch([(1, i)])).updates for i in tokenizer.encode("xab.")]
    texts = [updates[0].output.outputs[0].text if updates else None for updates in seen]
    assert texts[-1] == "xab."
    assert None in texts


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_is_no_part_of_the_text(assembler, tokenizer, stream):
    ids = tokenizer.encode("the fox")
    for include, expected in ((False, "the"), (True, "the fox")):
        add(assembler, stream=stream, include_stop_str_in_output=include)
        [update] = assembler.process(batch([(1, i) for i in ids], [(1, "stop", ids[-1])])).updates
        completion = update.output.outputs[0]
        assert completion.text.strip() == expected
        assert completion.token_ids == ids
        assert (completion.finish_reason, completion.stop_reason) == ("stop", ids[-1])


@pytest.mark.parametrize("stop", [None, "fox"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_outputs_text_continues_the_prompts_text(llama2_tokenizer, stream, stop):
    assembler = OutputProcessor(llama2_tokenizer)
    prompt, ids = (llama2_tokenizer.encode(text, add_special_tokens=False) for text in ("say", "the quick"))
    assembler.add(checked("r", prompt, SamplingParams(n=2, stop=stop), text="say", stream=stream), [1, 2])
    tokens = [(seq_id, token_id) for token_id in ids for seq_id in (1, 2)]
    assembler.process(batch(tokens[:2]))
    assembler.rebind(2, 3)  # the request has moved to another rank
    tokens = [(1 if seq_id == 1 else 3, token_id) for seq_id, token_id in tokens[2:]]
    step = assembler.process(batch(tokens, [(1, "length"), (3, "length")]))
    assert [each.text for each in step.updates[-1].output.outputs] == [" the quick"] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_a_request_and_aborts_it_in_the_engine(assembler, tokenizer, stream):
    ids = tokenizer.encode("the quick brown fox")
    add(assembler, stream=stream, stop=["brown"], logprobs=0)
    logprobs = [(1, TokenLogprobs([token_id], [-1.0], 1)) for token_id in ids]
    step = assembler.process(batch([(1, i) for i in ids], logprobs=logprobs))
    assert step.aborts == [1]
    completion = step.updates[-1].output.outputs[0]
    assert completion.text == "the quick "
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "brown")
    assert len(completion.logprobs) == len(completion.token_ids) < len(ids)
    assert completion.cumulative_logprob == -len(completion.token_ids)
    # what the engine still sends until the abort reaches it is nobody's
    late = assembler.process(
        batch([(1, 3)], [(1, "length")], started=[(1, 0)], logprobs=[(1, TokenLogprobs([3], [0.0], 1))])
    )
    assert late.updates == []
    assert late.aborts == []


def test_a_stop_string_wins_over_the_end_in_the_same_batch(assembler, tokenizer):
    ids = tokenizer.encode("the quick")
    add(assembler, stop=["quick"])
    step = assembler.process(batch([(1, i) for i in ids], [(1, "length")]))
    assert step.aborts == []
    assert step.updates[0].output.outputs[0].stop_reason == "quick"


def test_sequences_of_one_request_finish_together(assembler, tokenizer):
    add(assembler, [10, 11, 12])
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    assert assembler.process(batch([(11, b), (10, a)], [(11, "length")])).updates == []
    [update] = assembler.process(batch([(12, c), (12, c)], [(10, "abort"), (12, "length")], started=[(10, 4)])).updates
    assert [o.text for o in update.output.outputs] == ["a", "b", "cc"]
    assert [o.index for o in update.output.outputs] == [0, 1, 2]
    assert [o.finish_reason for o in update.output.outputs] == ["abort", "length", "length"]
    assert update.output.num_cached_tokens == 4


def test_interleaved_seq_ids_are_told_apart(assembler):
    rng = np.random.default_rng(0)
    tokens = [(int(seq_id), int(token)) for seq_id, token in rng.integers(0, 50, (2000, 2))]
    for seq_id in range(50):
        add(assembler, [seq_id], request_id=str(seq_id))
    step = assembler.process(batch(tokens, [(seq_id, "length") for seq_id in range(50)]))
    for seq_id, update in enumerate(step.updates):
        assert update.request_id == str(seq_id)
        assert update.output.outputs[0].token_ids == [token for h, token in tokens if h == seq_id]


def test_logprobs_are_by_token_with_text_and_rank(assembler, tokenizer):
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    add(assembler, [1], logprobs=2, prompt_logprobs=1)
    add(assembler, [2], request_id="without")
    entry = TokenLogprobs([a, b, c], [-3.0, -0.5, -1.5], 5)
    same = TokenLogprobs([b, b, c], [-0.25, -0.25, -1.5], 1)
    prompt = [TokenLogprobs([6, b], [-2.0, -1.0], 4)]
    assembler.process(batch([(2, a), (1, a)], logprobs=[(1, entry)], prompt_logprobs=[(1, 1, prompt)]))
    step = assembler.process(batch([(1, b)], [(1, "length")], logprobs=[(1, same)], prompt_logprobs=[(1, 2, prompt)]))
    output = step.updates[0].output
    first, second = output.outputs[0].logprobs
    assert list(first) == [a, b, c]
    assert [(x.logprob, x.rank, x.decoded_token) for x in first.values()] == [
        (-3.0, 5, "a"),
        (-0.5, 1, "b"),
        (-1.5, 2, "c"),
    ]
    assert list(second) == [b, c]
    assert output.outputs[0].cumulative_logprob == -3.25
    assert output.prompt_logprobs[0] is None
    assert [sorted(p) for p in output.prompt_logprobs[1:]] == [sorted([6, b])] * 2


@pytest.mark.parametrize(("reason", "kind"), [("error", InvalidRequest), ("failed", RequestFailed)])
def test_an_error_ends_the_whole_request(assembler, reason, kind):
    add(assembler, [1, 2])
    step = assembler.process(batch([(1, 5)], [(1, reason, "too long")]))
    [update] = step.updates
    request_id, output, error = update.request_id, update.output, update.error
    assert (request_id, output) == ("r", None)
    assert isinstance(error, kind)
    assert str(error) == "too long"
    assert step.aborts == [2]
    assert assembler.process(batch([(2, 5)], [(2, "length")])).updates == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_request_keeps_its_output_so_far(assembler, tokenizer, stream):
    add(assembler, [1, 2], stream)
    token = tokenizer.encode("a")[0]
    assembler.process(batch([(1, token), (2, token)], [(2, "length")]))
    output = assembler.abort("r")
    assert output.finished
    assert [o.text for o in output.outputs] == ["a", "a"]
    assert [o.finish_reason for o in output.outputs] == ["abort", "length"]
    assert assembler.process(batch([(1, token)], [(1, "length")])).updates == []


def test_an_output_without_detokenization_has_token_ids_and_no_text(assembler):
    add(assembler, stream=True, detokenize=False)
    [update] = assembler.process(batch([(1, 40)])).updates
    assert (update.output.outputs[0].text, update.output.outputs[0].token_ids) == ("", [40])
    [update] = assembler.process(batch([(1, 41)], [(1, "length")])).updates
    assert update.output.outputs[0].text == ""


def test_a_traced_request_lists_the_steps_that_gave_it_tokens(tokenizer):
    assembler = OutputProcessor(tokenizer, clock=lambda: 100.0)
    add(assembler, [1])
    assembler.is_tracing = True
    add(assembler, [2, 3], request_id="traced")
    token = tokenizer.encode("the")[0]
    assert assembler.process(batch([(2, token)], queued=[(2, 0.5)])).updates == []
    assembler.rebind(2, 4)
    step = assembler.process(batch([(1, token), (3, token), (4, token)], [(1, "stop"), (3, "stop"), (4, "stop")]))
    plain, traced = (update.output.trace for update in step.updates)
    assert plain is None
    assert (traced.queue_s, traced.num_steps, traced.steps) == (0.5, 2, [(99.99, 100.0)] * 2)


def test_times_and_numbers_of_tokens_are_known_when_a_request_ends(tokenizer):
    now = [100.0]
    assembler = OutputProcessor(tokenizer, lambda: now[0])
    add(assembler, [1, 2])
    now[0] = 101.0
    assembler.process(batch([(1, 5), (2, 5)], queued=[(1, 0.25)]))
    now[0] = 103.0
    step = assembler.process(batch([(1, 5), (2, 5), (2, 6)], [(1, "length"), (2, "length")]))
    [update] = step.updates
    metrics = update.output.metrics
    assert (metrics.arrival_s, metrics.queue_s, metrics.first_token_s) == (100.0, 0.25, 101.0)
    assert (metrics.last_token_s, metrics.finished_s, metrics.num_generation_tokens) == (103.0, 103.0, 5)
    assert metrics.arrival_time > 1.6e9


def test_logprobs_are_flat_if_asked_for(assembler, tokenizer):
    ids = tokenizer.encode("a b")[:2]
    entries = [TokenLogprobs([each], [-0.5], 2) for each in ids]
    outputs = []
    for flat in (False, True):
        add(assembler, logprobs=0, prompt_logprobs=0, flat_logprobs=flat)
        assembler.process(batch(prompt_logprobs=[(1, 1, entries)]))
        logprobs = [(1, entry) for entry in entries]
        step = assembler.process(batch([(1, each) for each in ids], [(1, "length")], logprobs=logprobs))
        outputs.append(step.updates[0].output)
    listed, flat = outputs
    assert type(flat.outputs[0].logprobs) is type(flat.prompt_logprobs) is FlatLogprobs
    assert flat.outputs[0].logprobs == listed.outputs[0].logprobs
    assert flat.prompt_logprobs == listed.prompt_logprobs
    assert len(flat.prompt_logprobs) == 3


def test_without_detokenizing_nothing_has_a_text(assembler, tokenizer, monkeypatch):
    ids = tokenizer.encode("Hello, world!")[:2]
    add(assembler, stream=True, detokenize=False, logprobs=0, prompt_logprobs=0)
    monkeypatch.setattr(type(tokenizer), "decode", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(type(tokenizer), "token_text", lambda *_, **__: 1 / 0)
    entries = [TokenLogprobs([each], [-0.5], 2) for each in ids]
    assembler.process(batch(prompt_logprobs=[(1, 1, entries)]))
    step = assembler.process(batch([(1, ids[0])], [(1, "length")], logprobs=[(1, entries[0])]))
    [update] = step.updates
    [completion] = update.output.outputs
    assert (completion.text, completion.token_ids) == ("", ids[:1])
    assert [each.decoded_token for each in completion.logprobs[0].values()] == [None]
    assert [each.decoded_token for each in update.output.prompt_logprobs[1].values()] == [None]


def test_tokens_that_a_request_chose_have_no_ranks(assembler, tokenizer):
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    add(assembler, [1], logprob_token_ids=[b, a, c])
    entry = TokenLogprobs([a, b, a, c], [-3.0, -0.5, -3.0, -1.5], 5)
    step = assembler.process(batch([(1, a)], [(1, "length")], logprobs=[(1, entry)]))
    (position,) = step.updates[-1].output.outputs[0].logprobs
    assert {token_id: each.rank for token_id, each in position.items()} == {a: 5, b: None, c: None}
