"""Where a module's tests are: `tests/unit` mirrors `raycore`, or a table here says what tests it instead."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "tests" / "unit"

ELSEWHERE = {
    "models/": "tests/unit/engine/test_families.py: each family, against transformers' code",
    "checkpoint/": "tests/unit/checkpoint: reading whole checkpoints",
    "parts/images/(?!runner|vision)": "tests/unit/parts/images: from a request's images to embeddings",
    "parts/images/(runner|vision)": "tests/unit/parts/images/vision: encoders, against transformers' code",
    "attention/": "tests/support/attention_contract.py: each way to compute attention",
    "encoder/": "tests/unit/encoder: text encoders, against transformers' code",
    "decoder/|layers/|step/|sampling/|runner/|state/|parallel/": "tests/unit/runner: steps, and what they compute",
    "weights/|parts/experts/": "tests/unit/weights: checkpoints' tensors, as ranks hold them",
    "kernels/": "tests/gpu: kernels on a GPU; tests/unit/kernels compares them where they can run",
    "fallback/": "tests/unit/fallback: models by transformers' code, against that code",
    "worker/|executor/|parts/weights/": "tests/unit/worker: whole workers",
    "engine/|scheduler/|hooks": "tests/unit/engine: whole engines; tests/simulation: what may happen to them",
    "client/|cluster/|control/|rpc/|node/|parts/servers/": "tests/simulation: all of the control plane, at all moments",
    "parts/(drafts|constraints|hidden_states|pooling|transfers|adapters)/": "tests/unit/engine: engines with the part",
    "server/parsers/": "tests/unit/server/parsers: transcripts of each format",
    "server/": "tests/unit/server: requests and their responses",
    "cli/": "tests/unit/cli: commands and what they print",
    "(data|serve)/": "tests/ray: what runs on Ray Data and Ray Serve",
    "simulation/": "tests/unit/simulation: whole simulations",
    "compat/": "tests/compat_scripts: programs that import vLLM's names",
    "config/|options/|engine_args|demo": "tests/unit/config: how options are read and checked",
    "metrics/|display/|notebook|text/": "tests/unit: what users see of an engine",
    "kv_transfer/|weight_transfer/": "tests/unit/test_public_names.py: names that forward",
    "(beam_search|errors|inputs|llm|messages|pooling_params|running_engine)": "tests/ray: what users call",
    "(class_paths|json_fields|lru_bytes|profile_session|reasoning_tags)": "tests/unit: those who use them",
}
"""What tests a module that has no mirror, by how its path in `raycore` begins: the first that fits."""

MAX_ELSEWHERE = 455
"""How many modules have no mirror, besides families, which tables test. A new module gets one; whoever moves tests to
their mirrors lowers the number."""
FAMILY = re.compile(r"^[A-Z0-9_]+ = Family\(", re.MULTILINE)


def mirrors(module: Path) -> set[Path]:
    """Where the tests of a module can be. Files of tests have names of their own, so the folder's may be part of it."""
    folder, room = module.parent, module.parts[1] if module.parts[0] == "parts" else module.parent.name
    return {UNIT / folder / f"test_{module.name}", UNIT / folder / f"test_{module.parent.name}_{module.name}"} | {
        UNIT / folder / f"test_{room}_{module.name}"
    }


MODULES = [
    path.relative_to(ROOT / "raycore")
    for path in sorted((ROOT / "raycore").rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py") and "assets" not in path.parts
]


def test_modules_have_mirrors_or_are_tested_elsewhere():
    elsewhere = [module for module in MODULES if not any(path.exists() for path in mirrors(module))]
    used = {next(start for start in ELSEWHERE if re.match(start, str(module))) for module in elsewhere}
    assert ELSEWHERE.keys() - used == set(), "every module there has a mirror"
    families = [module for module in elsewhere if FAMILY.search((ROOT / "raycore" / module).read_text())]
    assert len(elsewhere) - len(families) <= MAX_ELSEWHERE


def test_what_tests_modules_elsewhere_exists():
    places = [place for text in ELSEWHERE.values() for place in re.findall(r"tests[\w/.]*", text)]
    assert [place for place in places if not (ROOT / place.rstrip(".")).exists()] == []
