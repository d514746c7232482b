"""A chat template of the whole program, in a file."""

import os
import tempfile
from pathlib import Path

from vllm import LLM, SamplingParams

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "template.jinja"
        path.write_text(TEMPLATE)
        llm = LLM(os.environ["MODEL"], max_model_len=256, chat_template=str(path))
    params = SamplingParams(temperature=0, max_tokens=8)
    conversation = [{"role": "user", "content": "27 + 58 ="}]
    (answer,) = llm.chat(conversation, params, use_tqdm=False)
    assert answer.outputs[0].text.strip() == "85"
    (other,) = llm.chat(conversation, params, use_tqdm=False, chat_template=TEMPLATE + " ")
    assert other.prompt_token_ids != answer.prompt_token_ids


if __name__ == "__main__":
    main()
