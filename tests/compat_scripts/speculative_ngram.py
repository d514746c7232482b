"""Guesses from the prompt change nothing but the number of steps."""

import os

from vllm import LLM, SamplingParams

PROMPT = "27 + 58 = 85\n27 + 58 = 85\n27 + 58 = 85\n27 + 58 ="


def generate(**options):
    llm = LLM(model=os.environ["MODEL"], max_model_len=256, disable_log_stats=False, **options)
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    del llm
    return output.outputs[0].token_ids, metrics


def main():
    config = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
        # whether it pays or not
        "num_speculative_tokens_per_batch_size": [[1, 256, 3]],
    }
    guessed, metrics = generate(speculative_config=config)
    assert metrics["vllm:spec_decode_num_drafts"].value > 0
    assert len(metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values) == 3
    plain, _ = generate()
    assert guessed == plain


if __name__ == "__main__":
    main()
