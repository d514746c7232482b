"""Weights that are saved as the workers divide them, and an engine that loads them."""

import os
import shutil
import tempfile
from pathlib import Path

from vllm import LLM, EngineArgs, SamplingParams
from vllm.model_executor.model_loader import ShardedStateLoader
from vllm.utils.argparse_utils import FlexibleArgumentParser


def saved(folder):
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--output", "-o", required=True)
    parser.add_argument("--file-pattern", default=ShardedStateLoader.TP_ONLY_PATTERN)
    flags = ["--model", os.environ["MODEL"], "--max-model-len", "256", "-o", folder]
    args = parser.parse_args(flags)
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    llm.llm_engine.engine_core.save_sharded_state(path=args.output, pattern=args.file_pattern, max_size=5 * 1024**3)
    for path in Path(args.model).iterdir():
        if path.is_file() and path.suffix not in (".bin", ".pt", ".safetensors"):
            shutil.copy(path, folder)
    return answer(llm)


def answer(llm):
    return llm.generate("27 + 58 =", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text


def main():
    with tempfile.TemporaryDirectory() as folder:
        before = saved(folder)
        files = {path.name for path in Path(folder).glob("*.safetensors")}
        assert files == {ShardedStateLoader.TP_ONLY_PATTERN.format(rank=0, part=0)}
        assert "pp_rank" in ShardedStateLoader.PP_AND_TP_PATTERN
        loaded = LLM.from_engine_args(EngineArgs(model=folder, load_format="sharded_state", max_model_len=256))
        assert answer(loaded) == before
        assert before.strip() == "85"


if __name__ == "__main__":
    main()
