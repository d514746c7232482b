"""The demo model that ships with the package, and held-out problems to test it on.

The model is a tiny Llama that continues ``"27 + 58 ="`` with ``" 85"`` and then
stops.  It was trained by ``examples/train_demo_model.py``; tests and benchmarks
use the same held-out problems as that script, so they are generated here.
"""

import random
import zlib
from collections.abc import Iterator
from pathlib import Path

DEMO_MODEL_DIR = Path(__file__).parent / "assets" / "demo_model"


def demo_model_path() -> str:
    """Return the directory of the demo model, in Hugging Face layout."""
    return str(DEMO_MODEL_DIR)


def is_held_out(a: int, op: str, b: int) -> bool:
    """Tell whether ``a op b`` was kept out of training (one problem in twenty).

    The operands are sorted first, so that a held-out problem's mirror image
    (``b op a``) is held out with it and cannot give the answer away.
    """
    return zlib.crc32(f"{min(a, b)} {op} {max(a, b)}".encode()) % 20 == 0


def solve(a: int, op: str, b: int) -> int:
    """Return the value of ``a op b``, where ``op`` is ``"+"`` or ``"-"``."""
    return a + b if op == "+" else a - b


def held_out_problems(num_digits: int, count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield ``count`` distinct held-out sums and differences as (prompt, answer).

    Both operands have ``num_digits`` digits.  The answer is the exact text that
    continues the prompt, leading space included: ``("27 + 58 =", " 85")``.
    """
    low, high = (10 ** (num_digits - 1) if num_digits > 1 else 0), 10**num_digits - 1
    # About a twentieth of all problems is held out. Problems are drawn at random
    # until there are `count` distinct ones, so the limit is half of those.
    most = 2 * (high - low + 1) ** 2 // 40
    if count > most:
        raise ValueError(f"held_out_problems() gives at most {most} problems of {num_digits} digits, not {count}")
    rng = random.Random(seed)
    seen: set[tuple[int, str, int]] = set()
    while len(seen) < count:
        a, op, b = rng.randint(low, high), rng.choice("+-"), rng.randint(low, high)
        if is_held_out(a, op, b) and (a, op, b) not in seen:
            seen.add((a, op, b))
            yield f"{a} {op} {b} =", f" {solve(a, op, b)}"
