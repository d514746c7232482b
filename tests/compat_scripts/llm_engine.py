"""The loop of an engine that the script steps itself."""

import os

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams


def main():
    engine = LLMEngine.from_engine_args(EngineArgs(model=os.environ["MODEL"], max_model_len=256))
    pending = [(f"{number} + 11 =", SamplingParams(temperature=0, max_tokens=8)) for number in range(20, 26)]
    answers = {}
    request_id = 0
    while pending or engine.has_unfinished_requests():
        if pending:
            prompt, params = pending.pop(0)
            engine.add_request(str(request_id), prompt, params)
            request_id += 1
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            if output.finished:
                answers[output.request_id] = output.outputs[0].text.strip()
    assert answers == {str(index): str(31 + index) for index in range(6)}
    assert engine.get_num_unfinished_requests() == 0


if __name__ == "__main__":
    main()
