"""Imports point down only, and heavy ones stay where they are needed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BELOW = {
    "compat": {"cli"},
    "data": {"llm"},
    "engine_args": {"cli"},
    "cli": {"simulation", "server", "llm", "control"},
    "simulation": {"serve", "client", "engine"},
    "serve": {"server"},
    "server": {"demo", "llm"},
    "demo": set(),
    "llm": {"llm_engine"},
    "llm_engine": {"running_engine"},
    "running_engine": {"control"},
    "control": {"client", "cluster", "transfer"},
    "client": {"engine", "grammar", "metrics", "display", "beam_search", "inputs"},
    "cluster": {"engine", "status", "placement"},
    "trainer": {"engine"},
    "engine": {"scheduler", "executor", "values", "lru_bytes"},
    "scheduler": {"connectors", "kvcache", "guesses", "hooks", "grammar"},
    "executor": {"worker", "placement"},
    "worker": {"transfer", "connectors", "runner", "fallback", "encoder", "vision", "rpc", "activity"},
    "weight_transfer": {"transfer"},
    "transfer": {"weights", "config"},
    "kv_transfer": {"connectors"},
    "connectors": {"kvcache", "config", "node", "recurring"},
    "kvcache": {"messages"},
    "runner": {"decoder", "sampling", "guesses", "hooks"},
    "fallback": {"decoder"},
    "encoder": {"decoder"},
    "vision": {"decoder"},
    "decoder": {"attention", "profile_session"},
    "attention": {"state", "layers"},
    "state": {"layers", "kernels"},
    "layers": {"weights", "kernels"},
    "sampling": {"step", "kernels", "grammar", "config"},
    "weights": {"parallel", "checkpoint"},
    "parallel": {"step", "node"},
    "step": {"models", "messages", "guesses"},
    "kernels": {"models"},
    "rpc": {"messages", "ray_api"},
    "grammar": {"text", "node", "same_copy"},
    "guesses": {"config"},
    "metrics": {"messages", "status", "ray_api", "recurring"},
    "profile_session": {"config"},
    "config": {"options", "text", "same_copy"},
    "options": {"plain_errors"},
    "text": {"checkpoint"},
    "checkpoint": {"models", "class_paths", "extras"},
    "models": {"pooling_params", "plugins", "cache_layout"},
    "messages": {"lora", "pooling_params", "cache_layout"},
    "notebook": {"display"},
    "display": {"outputs", "status"},
    "beam_search": {"lora", "outputs"},
    "values": {"lora"},
    "inputs": {"sampling_params"},
    "lora": {"sampling_params"},
    "pooling_params": {"sampling_params"},
    "outputs": {"lora"},
    "sampling_params": {"structured_outputs", "json_fields", "reasoning_tags"},
    "structured_outputs": {"short_tracebacks"},
    "status": set(),
    "ray_api": {"node", "same_copy"},
    "node": {"errors"},
    "plain_errors": {"json_fields"},
    "class_paths": {"plugins"},
    "plugins": {"errors"},
    "extras": {"errors"},
    "json_fields": {"errors"},
    "short_tracebacks": {"errors"},
    "errors": {"placement"},
    "recurring": {"system"},
    "activity": set(),
    "cache_layout": set(),
    "hooks": set(),
    "lru_bytes": set(),
    "reasoning_tags": set(),
    "same_copy": set(),
    "placement": {"system"},
    "system": set(),
}
"""What each layer may import itself; what those import in turn is below it, too."""

UP_FOR_TYPES = {
    # an error holds the output that the request had
    ("errors", "outputs"),
    # the arguments that `from_engine_args` takes: an object with the flags of commands
    ("llm_engine", "engine_args"),
    ("running_engine", "engine_args"),
    # the generated types of options name a part's own
    ("options", "config"),
}
"""Imports for type checkers alone that point up."""

DOORS = {None, "__init__", "__main__"}
"""`raycore` itself, its command, and the folder of the parts."""

RAY_USERS = re.compile(
    r"placement/|raycore/ray_api\.py|raycore/cluster/|raycore/parts/\w+/cluster(/|\.py)|raycore/client/rank_connections\.py|raycore/executor/ray_executor\.py"
    r"|raycore/rpc/channel\.py|raycore/control/(clusters|pauses|program|remote|replies)\.py|raycore/metrics/ray_export\.py"
    r"|raycore/server/serve_app\.py|raycore/server/multi_process/api_servers?\.py|raycore/data/(processor|tables)\.py|.*/(engine|worker|control)_actor\.py"
    r"|raycore/parts/weights/transfer/references\.py|raycore/serve/(app|replica|router|served_model)\.py"
)
"""Who may load Ray: its exceptions and the type of its placement groups, and the rest of it through `ray_api`."""

RAY_PLACES = re.compile(
    r"placement/|raycore/ray_api\.py|raycore/cluster/(__init__|connection|joining|logs|owner|local_ray/(start|replacements|room))\.py"
    r"|raycore/metrics/ray_export\.py|raycore/rpc/channel\.py|raycore/server/serve_app\.py|raycore/data/(processor|tables)\.py"
    r"|raycore/parts/weights/transfer/references\.py|raycore/serve/(app|replica|router|served_model)\.py"
)
"""Who may use what `ray_api` doesn't have."""

RAY_TYPES = re.compile(r"ray\.exceptions\b|ray\.util\.placement_group(\.PlacementGroup)?$")
TORCH_PLACES = re.compile(
    r"raycore/(worker|runner|fallback|encoder|decoder|attention|state|layers|weights|parallel|sampling|step|kernels)/"
    r"|raycore/parts/\w+/(worker|runner|vision|decoder|layers|weights|parallel|sampling|transfer)(/|\.py)"
    r"|raycore/parts/weights/transfer/"
    r"|raycore/parts/transfers/connectors/(\w+/)?worker_side/|raycore/compat/(tensors|weight_transfer)\.py|raycore/trainer\.py"
)
CHANNEL_PLACES = re.compile(r"raycore/rpc/channel\.py")

CIRCLES_OF_TYPES = {
    # an error holds the output that the request had
    ("raycore.errors", "raycore.outputs"),
    # what reads the fields of a value that holds their results
    ("raycore.config.given_places", "raycore.config.parallel"),
    ("raycore.cluster.desired", "raycore.cluster.rank"),
    ("raycore.cluster.given", "raycore.cluster.runtime"),
    # the worker class that the function imports
    ("raycore.worker.rank", "raycore.worker.protocol"),
    # a part is told of the worker that has it
    ("raycore.worker.part", "raycore.worker.core"),
    # a part is told of the engine that has it
    ("raycore.engine.part", "raycore.engine.rank_memory"),
    # layers that operations make of other operations
    ("raycore.parts.experts.layers.routed_experts", "raycore.layers.operations"),
    ("raycore.parts.experts.layers.router", "raycore.layers.operations"),
    # a model's spec has parts, and how large they are depends on the model
    ("raycore.models.feed_forward", "raycore.models.spec"),
    ("raycore.models.closing", "raycore.models.spec"),
    ("raycore.models.streams", "raycore.models.spec"),
    ("raycore.models.mixers.sharing", "raycore.models.spec"),
    ("raycore.models.layer_part", "raycore.models.spec"),
    ("raycore.parts.experts.models", "raycore.models.spec"),
    ("raycore.parts.images.models", "raycore.models.spec"),
    ("raycore.models.mixers.attention", "raycore.models.spec"),
    ("raycore.models.mixers.beside", "raycore.models.spec"),
    ("raycore.models.mixers.block_selecting", "raycore.models.spec"),
    ("raycore.models.mixers.delta", "raycore.models.spec"),
    ("raycore.models.mixers.kda", "raycore.models.spec"),
    ("raycore.models.mixers.kinds", "raycore.models.spec"),
    ("raycore.models.mixers.latent", "raycore.models.spec"),
    ("raycore.models.mixers.lightning", "raycore.models.spec"),
    ("raycore.models.mixers.mamba1", "raycore.models.spec"),
    ("raycore.models.mixers.mamba2", "raycore.models.spec"),
    ("raycore.models.mixers.no_mixer", "raycore.models.spec"),
    ("raycore.models.mixers.short_conv", "raycore.models.spec"),
    ("raycore.models.mixers.selecting", "raycore.models.spec"),
    ("raycore.models.mixers.spec", "raycore.models.spec"),
}
"""Imports for type checkers alone that close a circle: the module that needs the type, and that which has it."""

SOURCE_FILES = sorted(path for package in ("raycore", "placement") for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def imports_of(path: Path, *, for_types: bool = False) -> frozenset[str]:
    """Every module that a file imports, wherever in it. With `for_types`, also what only type checkers import."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
            pending += node.orelse
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import"
            found.update([node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)])
        elif isinstance(node, (ast.stmt, ast.ExceptHandler, ast.Module)):
            pending += ast.iter_child_nodes(node)
    return frozenset(found)


def layer_of(module: str) -> str | None:
    """The layer of one of our modules, None for others' and for `raycore` itself."""
    names = module.split(".")
    if names[0] == "placement":
        return "placement"
    if names[:2] == ["raycore", "parts"]:  # the side of a room: parts/adapters/scheduler.py is in the scheduler's layer
        return names[3] if len(names) > 3 else None
    return names[1] if names[0] == "raycore" and len(names) > 1 else None


def values_beside(path: Path) -> set[str]:
    """What all sides of a file's room may import: the room's values, and their names."""
    room = name_of(path).split("/")[:3]
    if room[:2] != ["raycore", "parts"]:
        return set()
    values = ".".join([*room, "values"])
    return {values, *(module for module in imports_of(path, for_types=True) if module.startswith(f"{values}."))}


def modules_imported(*, for_types: bool) -> dict[str, set[str]]:
    """Which of our modules each of them imports. `raycore` itself, the door to all of them, is left out."""
    names = {
        name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in SOURCE_FILES
    }
    del names["raycore"]
    return {
        name: {module for module in imports_of(path, for_types=for_types) if module in names} - {name}
        for name, path in names.items()
    }


def circle_in(imports: dict[str, set[str]]) -> list[str] | None:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def layers_below(layer: str) -> set[str]:
    found: set[str] = set()
    pending = [layer]
    while pending:
        for lower in BELOW[pending.pop()] - found:
            found.add(lower)
            pending.append(lower)
    return found


def test_a_layer_imports_only_what_is_below_it():
    wrong: list[str] = []
    for path in SOURCE_FILES:
        layer = layer_of(name_of(path).removesuffix(".py").replace("/", "."))
        if layer in DOORS:
            continue
        allowed = layers_below(layer) | {layer}
        others = {module for module in imports_of(path, for_types=True) if module not in values_beside(path)}
        imported = {layer_of(module) for module in others} & set(BELOW)
        up = {other for other in imported - allowed if (layer, other) in UP_FOR_TYPES}
        up -= {layer_of(module) for module in imports_of(path)}
        wrong += [f"{name_of(path)} imports {other}" for other in sorted(imported - allowed - up)]
    assert wrong == []


def test_the_architecture_page_lists_the_layers_from_top_to_bottom():
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("## Layers")[2].partition("| package | role |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines()[2:]]
    place = {name: index for index, names in enumerate(rows) for name in names}
    packages = {path.parent.name for path in (ROOT / "raycore").glob("*/__init__.py")} - {"parts"}
    assert (packages | BELOW.keys()) - place.keys() == set()
    assert [
        f"{layer} stands below {lower}"
        for layer in BELOW
        for lower in layers_below(layer) - {layer}
        if place[layer] > place[lower]
    ] == []


def test_placement_imports_nothing_of_raycore_but_the_system():
    assert [
        name_of(path)
        for path in SOURCE_FILES
        if path.is_relative_to(ROOT / "placement")
        and any(module.startswith("raycore") and not module.startswith("raycore.system") for module in imports_of(path))
    ] == []


@pytest.mark.parametrize(
    ("package", "places"),
    [
        ("ray", RAY_USERS),
        ("raycore.ray_api", RAY_USERS),
        ("torch", TORCH_PLACES),
        ("ray.experimental.channel", CHANNEL_PLACES),
    ],
    ids=["ray", "ray_api", "torch", "channels"],
)
def test_a_package_is_imported_only_in_its_places(package: str, places: re.Pattern[str]):
    users = [
        name_of(path)
        for path in SOURCE_FILES
        if any(f"{module}.".startswith(f"{package}.") for module in imports_of(path))
    ]
    assert [name for name in users if not places.match(name)] == []


def test_ray_is_used_through_ray_api():
    users = [
        name_of(path)
        for path in SOURCE_FILES
        if any(f"{module}.".startswith("ray.") and not RAY_TYPES.match(module) for module in imports_of(path))
    ]
    assert [name for name in users if not RAY_PLACES.match(name)] == []


@pytest.mark.parametrize(
    ("modules", "kept_out"),
    [
        ("raycore, raycore.config, raycore.scheduler.scheduler, placement.plan", {"torch", "transformers", "ray"}),
        (
            "raycore.llm, raycore.engine.engine_actor, raycore.server.multi_process.api_server",
            {"torch", "transformers", "raycore.parts.pooling.server"},
        ),
        ("raycore.control.control_actor", {"torch", "transformers", "numpy", "msgspec", "tokenizers"}),
        (
            "raycore.llm, raycore.worker.worker, raycore.parts.constraints.grammar.compiler",
            {"llguidance", "raycore.parts.pooling.layers.pooler"},
        ),
        ("raycore.cli.run_batch, raycore.server.batch.runner", {"torch", "raycore.parts.pooling.server"}),
        ("raycore.cli.main", {"torch", "transformers", "numpy", "ray"}),
        # whoever computes without Ray doesn't pay for it, nor do tests, which fork what has imported these
        ("raycore.engine.core, raycore.executor.inline, raycore.worker.worker", {"ray"}),
    ],
)
def test_imports_do_not_load_the_modules_kept_out(modules: str, kept_out: set[str]):
    code = f"import sys, {modules}; print(*sorted({kept_out!r} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def test_no_module_imports_one_that_imports_it():
    """Not even in a function: that hides the circle, and neither module can be understood without the other."""
    assert circle_in(modules_imported(for_types=False)) is None


def test_circles_of_types_are_those_that_are_listed():
    imports = modules_imported(for_types=True)
    assert [(user, used) for user, used in sorted(CIRCLES_OF_TYPES) if used not in imports[user]] == []
    without = {name: {each for each in used if (name, each) not in CIRCLES_OF_TYPES} for name, used in imports.items()}
    assert circle_in(without) is None, "import the type from a module below, or pass what is needed of it"
    for user, used in CIRCLES_OF_TYPES:
        assert circle_in({**without, user: without[user] | {used}}) is not None, f"{user} and {used} need no line here"


def modules_of_sides(*sides: str) -> list[str]:
    """The modules of these sides of all rooms."""
    paths = [path for path in (ROOT / "raycore" / "parts").glob("*/*") if path.stem in sides]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return sorted(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files)


@pytest.mark.parametrize(
    ("sides", "kept_out"),
    [
        (("config", "values", "scheduler", "engine"), {"client", "server", "worker", "runner", "layers", "weights"}),
        (("client", "control"), {"server", "worker", "runner", "layers", "weights"}),
        (("server", "serve"), {"worker", "runner", "layers", "weights"}),
        (("layers", "weights"), {"client", "engine", "scheduler", "server", "worker", "runner"}),
        (("runner",), {"client", "engine", "scheduler", "server", "worker"}),
        (("worker",), {"client", "engine", "scheduler", "server"}),
    ],
)
def test_the_sides_of_a_room_are_imported_apart(sides: tuple[str, ...], kept_out: set[str]):
    modules = modules_of_sides(*sides)
    assert modules
    code = f"import sys\nfor each in {modules}: __import__(each)\nprint(*(m for m in sys.modules if 'raycore.' in m))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    loaded = [each.split(".") for each in run.stdout.split() if each.startswith("raycore.parts.")]
    assert {names[3] for names in loaded if len(names) > 3} & kept_out == set()
