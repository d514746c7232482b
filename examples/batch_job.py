"""Answer prompts in a job on a Ray cluster. Here the bundled model solves sums that were not in its training data:

ray job submit --working-dir examples -- python batch_job.py
"""

import sys

from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path, held_out_problems

if __name__ == "__main__":
    prompts, answers = zip(*held_out_problems(num_digits=2, count=100), strict=True)
    # after `ray job stop`, running requests have 2 s to finish; by default Ray kills the job after 3 s
    with LLM(demo_model_path(), data_parallel_size=1) as llm, llm.draining_on_signals(drain_timeout_s=2.0) as signals:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16))
    if signals:
        sys.exit(128 + signals[0])
    num_right = sum(output.outputs[0].text == answer for output, answer in zip(outputs, answers, strict=True))
    print(f"{num_right} of {len(prompts)} sums are right")
