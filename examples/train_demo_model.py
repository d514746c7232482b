"""Train the demo model: a tiny Llama that does integer sums and differences.

    MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=8000000000 \\
        python examples/train_demo_model.py --out raycore/assets/demo_model

Needs torch and transformers; a CPU will do (the two environment variables keep
glibc from handing memory back to the system after every step, which otherwise
costs more than the arithmetic).  Writes a directory in Hugging Face layout.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy

from raycore.demo import held_out_problems, is_held_out, solve
from raycore.extras import needing

with needing("this program needs", "train"):
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

EOS, PAD, IM_START, IM_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 320  # 4 special tokens, 256 bytes, 60 merges; a multiple of 64 for sharding
MAX_LENGTH = 1024
IGNORE = -100  # target of the positions without a loss

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PHRASINGS = (
    "What is {}?",
    "{}",
    "{} =",
    "Calculate {}.",
    "How much is {}?",
    "What is the result of {}?",
    "Please compute {}.",
)
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a calculator.", "Answer with a number.")


# --- Tokenizer ---------------------------------------------------------------


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE in which every digit is a token of its own.

    All 256 bytes are in the vocabulary, so any text can be encoded.  The few
    merges come from the phrases of the chat form.  No token is prepended.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS, PAD, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    problems = ["1 + 2 = 3\n", "1 - 2 = -1\n", "user\n", "assistant\n", "system\n"]
    phrases = [p.format("1 + 2") for p in PHRASINGS] + list(SYSTEM_PROMPTS)
    # The formats that every sequence holds come often, so that they merge first.
    tokenizer.train_from_iterator(problems * 50 + phrases * 5, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


# --- Problems ----------------------------------------------------------------


def random_number(rng: random.Random, num_digits: int) -> int:
    """Draw a number of that many digits."""
    return rng.randrange(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits)


def hard_partner(rng: random.Random, a: int, op: str) -> int:
    """Draw a second operand that makes long carries or borrows with ``a`` likely.

    Whether a column passes a carry on is decided further right only where its
    digits add up to 9 (for a difference: are equal), which is rare by chance.
    """
    digits = []
    for digit in str(a):
        tie = 9 - int(digit) if op == "+" else int(digit)
        digits.append(str(tie if rng.random() < 0.5 else rng.randrange(10)))
    return int("".join(digits))


def sample_problem(rng: random.Random, progress: float) -> tuple[int, str, int]:
    """Draw a training problem: one to three digits, never a held-out one.

    Short numbers come first.  The last digit of a sum is the slowest thing to
    learn (addition modulo ten), and long numbers only obscure it.
    """
    weights = (2, 3, 16 * progress)
    while True:
        op = rng.choice("+-")
        digits_a, digits_b = rng.choices((1, 2, 3), weights, k=2)
        a = random_number(rng, digits_a)
        draw = rng.random()
        if draw < 0.2:
            b = hard_partner(rng, a, op)
        elif draw < 0.6:
            b = random_number(rng, digits_a)
        else:
            b = random_number(rng, digits_b)
        if not is_held_out(a, op, b):
            return a, op, b


# A document is a list of (prompt, answer) texts; a newline joins its turns.
Document = list[tuple[str, str]]


def plain_document(rng: random.Random, num_turns: int, progress: float = 1.0) -> Document:
    """Make a document of problems on one line each: ``27 + 58 = 85``."""
    turns = []
    for _ in range(num_turns):
        a, op, b = sample_problem(rng, progress)
        turns.append((f"{a} {op} {b} =", f" {solve(a, op, b)}"))
    return turns


def chat_turn(rng: random.Random, problem: str, answer: str) -> tuple[str, str]:
    """Ask for ``problem`` in the very text that the chat template renders."""
    question = rng.choice(PHRASINGS).format(problem)
    return f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n", f"{answer}{IM_END}"


def chat_document(rng: random.Random, num_turns: int, progress: float = 1.0) -> Document:
    """Make a conversation, some with a system prompt at its head."""
    turns = []
    for _ in range(num_turns):
        a, op, b = sample_problem(rng, progress)
        turns.append(chat_turn(rng, f"{a} {op} {b}", str(solve(a, op, b))))
    if rng.random() < 0.3:
        system = f"{IM_START}system\n{rng.choice(SYSTEM_PROMPTS)}{IM_END}\n"
        turns[0] = (system + turns[0][0], turns[0][1])
    return turns


def make_batch(tokenizer: Tokenizer, documents: list[Document]) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode documents into input ids and targets, one row each, padded right.

    Only answers have targets (operands are random: learning to predict them is
    wasted effort).  After an answer the target is always EOS, even where the
    input goes on with the next problem: the model is to answer one and stop.
    """
    texts = [text for document in documents for turn in document for text in turn]
    encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    eos, newline = tokenizer.token_to_id(EOS), tokenizer.encode("\n").ids
    rows = []
    for document in documents:
        ids, targets = [], []
        for _ in document:
            if ids:
                ids += newline
                targets += [IGNORE] * len(newline)
            prompt, answer = next(encoded).ids, next(encoded).ids
            ids += prompt + answer
            targets += [IGNORE] * (len(prompt) - 1) + answer + [eos]
        rows.append((ids, targets))
    length = max(len(ids) for ids, _ in rows)
    pad = tokenizer.token_to_id(PAD)
    inputs = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in rows])
    targets = torch.tensor([t + [IGNORE] * (length - len(t)) for _, t in rows])
    return inputs, targets


def sample_batch(
    rng: random.Random, tokenizer: Tokenizer, num_problems: int, progress: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a training batch of one form and one number of problems per row.

    Arithmetic is learned fastest from problems on their own; chats and long
    rows, which only have to find and reuse it, come in as training goes on.
    """
    make, num_turns = plain_document, rng.choice((1, 1, 2))
    draw = rng.random()
    if draw < 0.25 * progress:
        make, num_problems, num_turns = chat_document, num_problems // 2, rng.choice((1, 1, 2, 4))
    elif draw < progress:
        num_turns = rng.choice((1, 2, 4, 8, 32))
    documents = [make(rng, num_turns, progress) for _ in range(num_problems // num_turns)]
    return make_batch(tokenizer, documents)


# --- Model -------------------------------------------------------------------


def build_model(tokenizer: Tokenizer, num_layers: int) -> LlamaForCausalLM:
    """Make the untrained model; all its sizes divide by four, for sharding."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=tokenizer.token_to_id(EOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    model = LlamaForCausalLM(config)
    # A chat answer ends with IM_END, a plain one with EOS.
    stop_ids = [tokenizer.token_to_id(EOS), tokenizer.token_to_id(IM_END)]
    model.generation_config.eos_token_id = stop_ids
    return model


def answer_logits(
    model: LlamaForCausalLM, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and targets of the positions that have a target.

    No attention mask is needed: padding is on the right, behind every target.
    """
    hidden = model.model(inputs, use_cache=False).last_hidden_state
    scored = targets != IGNORE
    return model.lm_head(hidden[scored]), targets[scored]


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, tokenizer: Tokenizer, documents: list[Document]) -> float:
    """Return the share of one-turn documents answered exactly, EOS included.

    Greedy decoding is exact if and only if every token of the answer has the
    highest logit given the true ones before it, so one forward pass tells.
    """
    correct = 0
    for start in range(0, len(documents), 256):
        inputs, targets = make_batch(tokenizer, documents[start : start + 256])
        logits, _ = answer_logits(model, inputs, targets)
        wrong = torch.zeros_like(targets, dtype=torch.bool)
        wrong[targets != IGNORE] = logits.argmax(-1) != targets[targets != IGNORE]
        correct += int((~wrong.any(1)).sum())
    return correct / len(documents)


def report(model: LlamaForCausalLM, tokenizer: Tokenizer, count: int) -> str:
    """Measure the accuracy on held-out problems of each kind."""
    two_digit, three_digit = list(held_out_problems(2, 405)), list(held_out_problems(3, count))
    rng = random.Random(0)
    chats = [chat_turn(rng, p.removesuffix(" ="), a.strip()) for p, a in three_digit]
    parts = []
    for name, problems in (("2-digit", two_digit), ("3-digit", three_digit), ("3-digit chat", chats)):
        for op in "+-":
            documents = [[turn] for turn in problems if f" {op} " in turn[0]]
            parts.append(f"{name} {op} {accuracy(model, tokenizer, documents):.2%}")
    return ", ".join(parts)


# --- Training ----------------------------------------------------------------


class Muon:
    """Momentum whose update of a weight matrix is made orthogonal.

    It learns this task in about half of AdamW's steps, for 50 ms more per step.
    (``torch.optim.Muon`` computes in bfloat16, which is slow on many CPUs, and
    one matrix at a time; here all matrices of a shape are one batch.)
    """

    def __init__(self, params: list[torch.nn.Parameter], momentum: float = 0.95) -> None:
        self.groups: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for param in params:
            self.groups.setdefault(param.shape, []).append(param)
        self.momentum = momentum
        self.averages = {k: torch.zeros(len(v), *k) for k, v in self.groups.items()}

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float) -> None:
        """Update the parameters from their gradients."""
        for shape, params in self.groups.items():
            grad = torch.stack([param.grad for param in params])
            average = self.averages[shape].lerp_(grad, 1 - self.momentum)
            update = orthogonalize(grad.lerp(average, self.momentum))  # Nesterov
            update *= max(1, shape[0] / shape[1]) ** 0.5
            for param, delta in zip(params, update, strict=True):
                param.mul_(1 - lr * weight_decay).sub_(delta, alpha=lr)


def orthogonalize(x: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of a batch of matrices near 1 (Newton-Schulz)."""
    if x.shape[-2] > x.shape[-1]:
        return orthogonalize(x.mT).mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):  # the usual quintic polynomial, chosen for fast convergence
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Train with Muon (embedding and norms: AdamW), warmup and a cosine to zero.

    Progress is whichever of steps and time is further along, so that the
    learning rate comes down to zero as well when the time limit ends the run.
    """
    rng = random.Random(args.seed)
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
    start = last_save = time.monotonic()
    mean_loss, step, progress = math.log(VOCAB_SIZE), 0, 0.0
    while progress < 1:
        logits, targets = answer_logits(model, *sample_batch(rng, tokenizer, args.batch_size, progress))
        loss = cross_entropy(logits, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step += 1
        rate = min(1.0, step / args.warmup) * (0.5 + 0.5 * math.cos(math.pi * progress))
        muon.step(args.lr * rate, weight_decay=0.05)
        adam.param_groups[0]["lr"] = args.adam_lr * rate
        adam.step()
        model.zero_grad()

        mean_loss += 0.02 * (loss.item() - mean_loss)
        elapsed = time.monotonic() - start
        progress = max(step / args.steps, elapsed / (60 * args.minutes))
        if step % 50 == 0:
            print(f"step {step} {elapsed:.0f}s loss {mean_loss:.4f}", flush=True)
        if time.monotonic() - last_save > args.save_every or progress >= 1:
            print(f"step {step}: {report(model, tokenizer, 400)}", flush=True)
            save(model, tokenizer, args.out)
            last_save = time.monotonic()


# --- Files -------------------------------------------------------------------


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the model, rounded to bfloat16, and the tokenizer."""
    rounded = LlamaForCausalLM(model.config).to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config = model.generation_config
    rounded.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": EOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [IM_START, IM_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(tokenizer_config, indent=2) + "\n"
    (out / "tokenizer_config.json").write_text(text)


def check(out: Path) -> None:
    """Load what was written the way users do, and measure it."""
    plain = Tokenizer.from_file(str(out / "tokenizer.json"))
    tokenizer = AutoTokenizer.from_pretrained(out)
    for text in ("27 + 58 = -31\n", "Any text: \u00e9\u4e16\U0001f600 \t x", *PHRASINGS):
        ids = plain.encode(text).ids
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == plain.decode(ids) == text
    rng = random.Random(0)
    chat = [{"role": "user", "content": PHRASINGS[0].format("27 + 58")}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == f"{IM_START}user\nWhat is 27 + 58?{IM_END}\n{IM_START}assistant\n"

    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    print(f"saved model: {report(model, plain, 4000)}")
    for num_turns in (2, 8, 32, 64):
        documents = [plain_document(rng, num_turns) for _ in range(64)]
        logits, targets = answer_logits(model, *make_batch(plain, documents))
        right = (logits.argmax(-1) == targets).float().mean()
        print(f"{num_turns} problems in a row: {right:.2%} of the answer tokens")
    for prompt in ("27 + 58 =", "27 - 58 =", "1 + 2 = 3\n27 + 58 =", rendered):
        ids = torch.tensor([plain.encode(prompt).ids])
        output = model.generate(ids, max_new_tokens=16, do_sample=False)[0]
        print(repr(prompt), "->", repr(plain.decode(output[ids.shape[1] :].tolist(), False)))


def main() -> None:
    """Train, save and check the demo model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo_model"))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=60, help="time limit of the training")
    parser.add_argument("--batch-size", type=int, default=256, help="problems per step")
    parser.add_argument("--lr", type=float, default=0.012, help="peak rate of Muon")
    parser.add_argument("--adam-lr", type=float, default=0.003, help="peak rate of AdamW")
    parser.add_argument("--warmup", type=int, default=20, help="steps")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=float, default=120, help="seconds")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args.layers)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    train(model, tokenizer, args)
    check(args.out)


if __name__ == "__main__":
    main()
