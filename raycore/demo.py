"""The demo model that ships with the package, and held-out problems to test it on.

The model is a tiny Llama that continues ``"27 + 58 ="`` with ``" 85"`` and then
stops.  It was trained by ``examples/train_demo_model.py``.  That script, the
tests and the benchmarks get the held-out problems from this module, so that
all of them use the same ones.
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
    """Tell whether ``a op b`` was kept out of training, as one problem in twenty was.

    If ``a op b`` is held out, so is ``b op a``, which could give the answer away.
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
    # About one problem in twenty is held out. At most half of the held-out ones
    # can be asked for: random draws would take too long to find the last of them.
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
