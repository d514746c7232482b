"""Teach the bundled model to add three digits, by group-relative policy optimization (GRPO), on a laptop:

    python examples/grpo.py                        a few minutes on two cores
    python examples/grpo.py --kill-rank-at 60      the same, although a rank dies while it samples

The model can only add two numbers. In each step, an engine with two data-parallel ranks samples a group of answers to
each of a few prompts. A trainer, which is another Ray actor, compares the answers of a group with each other, and makes
better ones likelier. Then the ranks take its weights in place. Samples have seeds, and log probabilities the same bits
everywhere, so both runs give the same rewards. Needs transformers, and for a picture matplotlib.
"""

import argparse
import itertools
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import ray
import torch

from raycore import LLM, RequestOutput, SamplingParams
from raycore.demo import demo_model_path
from raycore.extras import needing
from raycore.trainer import logprobs

with needing("this example needs", "train"):
    from transformers import AutoModelForCausalLM

Problem = tuple[int, int, int]
OPTIONS = {"dtype": "float32", "max_model_len": 32, "num_threads": 1}
"""Of the engine, and of the trainer's log probabilities, which then have the same bits."""
NUM_PROMPTS, GROUP_SIZE, MAX_TOKENS = 64, 8, 6
NUM_MINIBATCHES = 2
CLIP = 0.2
NUM_HELD_OUT = 200
SOFTENING = 3.0
"""What logits are divided by at the start: the model is sure of its wrong answers, so a group would have but one."""


def prompt_of(problem: Problem) -> str:
    return "{} + {} + {} =".format(*problem)


def reward_of(text: str, problem: Problem) -> float:
    """1 for the sum, up to 0.5 for a number near it, and 0 for anything else."""
    try:
        error = abs(int(text) - sum(problem))
    except ValueError:
        return 0.0
    return 1.0 if error == 0 else 0.5 * max(0.0, 1 - error / 5)


@dataclass
class Sample:
    """One answer to a prompt."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """Those with which the engine sampled the tokens."""
    reward: float


@ray.remote(num_cpus=0)  # the ranks have the CPUs, and wait while it trains
class Trainer:
    """The policy, and what changes it."""

    def __init__(self, path: str, learning_rate: float, num_steps: int) -> None:
        torch.set_num_threads(1)  # the tensors are small
        self._policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._policy.model.norm.weight.data /= SOFTENING
        self._optimizer = torch.optim.AdamW(self._policy.parameters(), lr=learning_rate, betas=(0.9, 0.95))
        num_updates = num_steps * NUM_MINIBATCHES
        self._schedule = torch.optim.lr_scheduler.LinearLR(self._optimizer, 1.0, 0.1, num_updates)

    def weights(self) -> dict[str, torch.Tensor]:
        return self._policy.state_dict()

    def train(self, groups: list[list[Sample]]) -> int:
        """Take a step. Returns the number of tokens whose log probabilities differ from the engine's."""
        num_different = 0
        pairs = [(sample, advantage) for group in groups for sample, advantage in with_advantages(group)]
        for index in range(NUM_MINIBATCHES):
            ids_BL, is_sampled_BL, sampled_BL, advantage_B1 = as_tensors(pairs[index::NUM_MINIBATCHES])
            mask_BL = ids_BL >= 0
            own_BL = logprobs(self._policy, ids_BL.clamp(min=0), mask_BL, **OPTIONS)
            if index == 0:  # the policy is still the one that sampled
                num_different = int((own_BL != sampled_BL)[is_sampled_BL].sum())
            ratio_BL = (own_BL - sampled_BL).exp()
            gain_BL = torch.minimum(ratio_BL * advantage_B1, ratio_BL.clamp(1 - CLIP, 1 + CLIP) * advantage_B1)
            self._optimizer.zero_grad()
            (-gain_BL[is_sampled_BL].mean()).backward()
            torch.nn.utils.clip_grad_norm_(self._policy.parameters(), 1.0)
            self._optimizer.step()
            self._schedule.step()
        return num_different


def with_advantages(group: list[Sample]) -> list[tuple[Sample, float]]:
    """How much better each sample is than its group, in standard deviations."""
    rewards = torch.tensor([sample.reward for sample in group])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return list(zip(group, advantages.tolist(), strict=True))


def as_tensors(pairs: list[tuple[Sample, float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return B samples of at most L tokens, padded on the right.

    Returns: the tokens, or -1, int64[B, L]; which of `ids[:, 1:]` were sampled, bool[B, L - 1]; with which log
    probabilities, float32[B, L - 1]; and the samples' advantages, float32[B, 1].
    """
    length = max(len(sample.prompt_ids) + len(sample.token_ids) for sample, _ in pairs)
    ids_BL = torch.full((len(pairs), length), -1)
    sampled_BL = torch.zeros(len(pairs), length - 1)
    is_sampled_BL = torch.zeros(len(pairs), length - 1, dtype=torch.bool)
    for row, (sample, _) in enumerate(pairs):
        start, end = len(sample.prompt_ids), len(sample.prompt_ids) + len(sample.token_ids)
        ids_BL[row, :end] = torch.tensor(sample.prompt_ids + sample.token_ids)
        sampled_BL[row, start - 1 : end - 1] = torch.tensor(sample.logprobs)
        is_sampled_BL[row, start - 1 : end - 1] = True
    return ids_BL, is_sampled_BL, sampled_BL, torch.tensor([[advantage] for _, advantage in pairs])


def update_weights(llm: LLM, trainer: ray.actor.ActorHandle, version: str) -> None:
    """Have all ranks take the trainer's weights. The driver never has them."""
    llm.start_weight_update()
    llm.update_weights({"update_info": {"refs": [trainer.weights.remote()]}})
    llm.finish_weight_update(version)


def roll_out(llm: LLM, problems: list[Problem], step: int) -> list[list[Sample]]:
    """Sample a group of answers to each problem."""
    params = [
        SamplingParams(n=GROUP_SIZE, temperature=1.0, max_tokens=MAX_TOKENS, logprobs=0, seed=1000 * step + index)
        for index in range(len(problems))
    ]
    outputs = llm.generate([prompt_of(problem) for problem in problems], params, use_tqdm=False)
    for output in outputs:
        check_whole(output, f"step {step}")
    return [
        [
            Sample(
                output.prompt_token_ids,
                each.token_ids,
                [by_token[token].logprob for token, by_token in zip(each.token_ids, each.logprobs, strict=True)],
                reward_of(each.text, problem),
            )
            for each in output.outputs
        ]
        for problem, output in zip(problems, outputs, strict=True)
    ]


def check_whole(output: RequestOutput, version: str) -> None:
    """Check that a group is complete, and all of it comes from these weights."""
    assert len(output.outputs) == GROUP_SIZE, output
    for each in output.outputs:
        assert each.finish_reason == "stop" or len(each.token_ids) == MAX_TOKENS, each
        assert len(each.logprobs) == len(each.token_ids) > 0, each
        (span,) = each.weight_versions
        assert (span.version, span.start, span.end) == (version, 0, len(each.token_ids)), each


def share_right(llm: LLM, problems: list[Problem]) -> float:
    """The share of problems that the likeliest answer solves."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    outputs = llm.generate([prompt_of(problem) for problem in problems], params, use_tqdm=False)
    pairs = zip(problems, outputs, strict=True)
    return sum(reward_of(output.outputs[0].text, problem) == 1 for problem, output in pairs) / len(problems)


def kill_rank(llm: LLM) -> None:
    """End a rank's actor while it samples, without a warning."""
    deadline_s = time.monotonic() + 10
    while not llm.num_unfinished_requests and time.monotonic() < deadline_s:
        time.sleep(0.001)
    ray.kill(ray.get_actor(f"raycore_{llm.name}_dp1"))


def plot(rewards: list[float], killed_at: int | None, path: Path) -> None:
    """Draw the mean reward of each step: a picture, or text without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        for step in range(0, len(rewards), -(-len(rewards) // 20)):
            print(f"{step:4d} {rewards[step]:.2f} {'#' * round(50 * rewards[step])}")
        return
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(rewards, color="tab:blue")
    if killed_at is not None:
        axes.axvline(killed_at, color="tab:red", linestyle="--", label="a rank is killed")
        axes.legend(loc="lower right")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="GRPO: adding three digits")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    print(f"plot: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--kill-rank-at", type=int, metavar="STEP", help="kill a rank while it samples in this step")
    parser.add_argument("--plot", type=Path, default=Path("grpo.png"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rng = random.Random(args.seed)
    problems = list(itertools.product(range(10), repeat=3))
    rng.shuffle(problems)
    held_out, problems = problems[:NUM_HELD_OUT], problems[NUM_HELD_OUT:]
    path, rewards = demo_model_path(), []
    started_s = time.monotonic()
    with LLM(
        path, data_parallel_size=2, batch_invariant=True, weight_transfer_config={"backend": "ray"}, **OPTIONS
    ) as llm:
        trainer = Trainer.remote(path, args.learning_rate, args.steps)
        update_weights(llm, trainer, "step 0")
        print(f"before: {share_right(llm, held_out):.0%} of {NUM_HELD_OUT} held-out sums are right")
        for step in range(args.steps):
            times_s = [time.monotonic()]
            if step == args.kill_rank_at:
                threading.Thread(target=kill_rank, args=[llm], daemon=True).start()
            groups = roll_out(llm, rng.sample(problems, NUM_PROMPTS), step)
            times_s.append(time.monotonic())
            num_different = ray.get(trainer.train.remote(groups))
            assert num_different == 0, f"{num_different} log probabilities aren't the trainer's"
            times_s.append(time.monotonic())
            update_weights(llm, trainer, f"step {step + 1}")
            times_s.append(time.monotonic())
            all_rewards = [sample.reward for group in groups for sample in group]
            rewards.append(sum(all_rewards) / len(all_rewards))
            if step % 10 and step not in (args.kill_rank_at, args.steps - 1):
                continue
            spent = ", ".join(
                f"{what} {after - before:.2f} s"
                for what, (before, after) in zip(
                    ("rollouts", "training", "weights"), itertools.pairwise(times_s), strict=True
                )
            )
            right = all_rewards.count(1.0) / len(all_rewards)
            print(f"step {step}: reward {rewards[-1]:.3f}, {right:.0%} right ({spent})", flush=True)
        print(f"after: {share_right(llm, held_out):.0%} of {NUM_HELD_OUT} held-out sums are right")
        print(
            f"{sum(rank.num_restarts for rank in llm.ranks)} ranks were replaced, {time.monotonic() - started_s:.0f} s"
        )
    plot(rewards, args.kill_rank_at, args.plot)


if __name__ == "__main__":
    main()
