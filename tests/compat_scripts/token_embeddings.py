"""An embedding of each token."""

import os

from vllm import LLM, PoolingParams


def main():
    llm = LLM(model=os.environ["MODEL"], runner="pooling", convert="embed", max_model_len=256)
    (output,) = llm.encode(["27 + 58 ="], PoolingParams(), pooling_task="token_embed")
    assert tuple(output.outputs.data.shape) == (len(output.prompt_token_ids), 128)
    assert output.finished


if __name__ == "__main__":
    main()
