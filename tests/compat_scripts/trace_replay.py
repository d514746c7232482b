"""Tokens that are replayed instead of sampled, with the model's log probabilities of them."""

import os

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=256)
    prompt = "27 + 58 ="
    greedy = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
    normal = llm.generate([prompt], greedy)[0].outputs[0]
    again = llm.generate([prompt], SamplingParams(trace_decode_token_ids=list(normal.token_ids), logprobs=5))[
        0
    ].outputs[0]
    assert list(again.token_ids) == list(normal.token_ids)
    assert again.text == normal.text
    assert again.finish_reason == "length"
    for token_id, one, other in zip(normal.token_ids, normal.logprobs, again.logprobs, strict=True):
        assert abs(one[token_id].logprob - other[token_id].logprob) < 1e-3
        assert other[token_id].rank == 1
        assert len(other) == 5
    eos = llm.get_tokenizer().eos_token_id
    unlikely = [normal.token_ids[1], eos, normal.token_ids[0], eos]
    replayed = llm.generate([prompt], SamplingParams(trace_decode_token_ids=unlikely, logprobs=0, max_tokens=1))[0]
    assert list(replayed.outputs[0].token_ids) == unlikely
    chosen = [entry[token_id] for token_id, entry in zip(unlikely, replayed.outputs[0].logprobs, strict=True)]
    assert chosen[0].rank > 1
    assert all(each.logprob <= 0.0 for each in chosen)


if __name__ == "__main__":
    main()
