"""Answers one conversation and several, with a template of the script's own."""

import os

from vllm import LLM, SamplingParams

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if shout %}!{% endif %}"


def main():
    llm = LLM(os.environ["MODEL"], max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=8)
    one = [{"role": "user", "content": "27 + 58 ="}]
    other = [{"role": "system", "content": "11 "}, {"role": "user", "content": [{"type": "text", "text": "+ 12 ="}]}]
    answer = llm.chat(one, params, use_tqdm=False, chat_template=TEMPLATE)
    assert answer[0].outputs[0].text.strip() == "85"
    texts = [each.outputs[0].text.strip() for each in llm.chat([one, other], params, chat_template=TEMPLATE)]
    assert texts == ["85", "23"]
    shouted = llm.chat(one, params, chat_template=TEMPLATE, chat_template_kwargs={"shout": True})
    assert shouted[0].prompt_token_ids != answer[0].prompt_token_ids


if __name__ == "__main__":
    main()
