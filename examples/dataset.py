"""Run a dataset through a model with Ray Data. Here the bundled model solves sums:

python dataset.py                     200 rows
python dataset.py --rows 20000        as many as the model has two-digit sums for, and more

With --model, any checkpoint that can continue a text.
"""

import argparse

import ray

from raycore.data import ProcessorConfig, build_processor
from raycore.demo import demo_model_path


def ask(row):
    left, right = 10 + row["id"] % 90, 10 + row["id"] // 90 % 90
    return {
        "prompt": f"{left} + {right} =",
        "right": f" {left + right}",
        "sampling_params": {"temperature": 0, "max_tokens": 8},
    }


def keep(row):
    return {"prompt": row["prompt"], "answer": row["generated_text"], "is_right": row["generated_text"] == row["right"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default=demo_model_path())
    args = parser.parse_args()
    config = ProcessorConfig(model_source=args.model, concurrency=args.ranks, batch_size=64)
    answers = build_processor(config, preprocess=ask, postprocess=keep)(ray.data.range(args.rows)).materialize()
    for row in answers.take(3):
        print(row["prompt"], row["answer"])
    print(f"{answers.sum('is_right')} of {answers.count()} are right")
