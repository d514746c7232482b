"""Options as a data class, from a command line."""

import dataclasses
import os

from vllm import LLM, EngineArgs, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=os.environ["MODEL"])
    group = parser.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    return vars(parser.parse_args(["--max_model_len", "256", "--max-tokens", "8", "--temperature=0", "--seed", "7"]))


def main():
    args = parse()
    max_tokens, temperature = args.pop("max_tokens"), args.pop("temperature")
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature = max_tokens, temperature
    assert llm.generate("27 + 58 =", params)[0].outputs[0].text.strip() == "85"
    given = dataclasses.asdict(EngineArgs(model=os.environ["MODEL"], max_model_len=128))
    assert given["max_model_len"] == 128
    assert SamplingParams(temperature=0).max_tokens == 16


if __name__ == "__main__":
    main()
