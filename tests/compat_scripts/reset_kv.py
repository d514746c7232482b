"""The prefix cache is emptied while a request, whose prompt's log probabilities are asked for, is running."""

import os

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def answer(engine, reset_at=None):
    params = SamplingParams(temperature=0, logprobs=1, prompt_logprobs=1, max_tokens=16, ignore_eos=True)
    engine.add_request("0", "27 + 58 =", params)
    step, found = 0, []
    while engine.has_unfinished_requests():
        if step == reset_at:
            assert engine.reset_prefix_cache(reset_running_requests=True)
        found += [output for output in engine.step() if output.finished]
        step += 1
    return found[0]


def main():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", os.environ["MODEL"], "--max-model-len", "256"])
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    expected = answer(engine)
    for step in (0, 3, 10):
        output = answer(engine, step)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


if __name__ == "__main__":
    main()
