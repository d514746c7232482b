"""Outputs that follow a choice, a pattern, a schema, a grammar."""

import json
import os
import re

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["sum", "difference"]}, "is_even": {"type": "boolean"}},
    "required": ["kind", "is_even"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "select " column " from " column\ncolumn ::= "a" | "b" | "c"\n'


def main():
    config = {"backend": "xgrammar", "disable_any_whitespace": True}
    llm = LLM(model=os.environ["MODEL"], max_model_len=256, structured_outputs_config=config)

    def generate(**constraint):
        params = SamplingParams(
            temperature=0.7, seed=1, max_tokens=120, structured_outputs=StructuredOutputsParams(**constraint)
        )
        return llm.generate("27 + 58 =", params)[0].outputs[0].text

    assert generate(choice=["yes", "no"]) in ("yes", "no")
    assert re.fullmatch(r"\d{3}-\d{4}", generate(regex=r"\d{3}-\d{4}"))
    answer = json.loads(generate(json=SCHEMA))
    assert set(answer) == {"kind", "is_even"}
    assert answer["kind"] in ("sum", "difference")
    assert json.loads(generate(json=json.dumps(SCHEMA)))["is_even"] in (True, False)
    assert re.fullmatch("select [abc] from [abc]", generate(grammar=GRAMMAR))


if __name__ == "__main__":
    main()
