"""Compiles the native kernels, for `raycore_package`.

The machine's C++ compiler does it. Where none works, the build requires `ziglang`, a compiler that
pip installs, into the environment of this build only. If the kernels can't be compiled at all, raycore is installed
without them. `_cpu.json`, beside their library, records what compiled them, or why nothing did.

Only those kernels are compiled that this machine's processor uses, because all of them take minutes of processor time.
`RAYCORE_CPU_KERNELS=all` compiles all of them: for packages that go to other machines. So do editable installations,
because tests compare instruction sets.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

ZIG = "ziglang>=0.17,<0.18"
OLDEST = "g++ 11 or clang 14"
SOURCES = Path(__file__).parents[1] / "raycore" / "kernels" / "csrc"
LIBRARY, RECORD = "_cpu.abi3.so", "_cpu.json"
"""The kernels' files. They contain no Python code: one library serves every version of Python."""
LOCK = "kernels.lock"
"""Whoever compiles ahead holds it."""

# fmt: off
FLAGS = [
    # with -O2, GCC keeps the numbers of short loops in memory instead of registers: most kernels take twice as long
    "-std=c++17", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-fwrapv", "-fno-math-errno", "-ffp-contract=off",
    # errors are torch's own, which unwind the stack; so the library needs no C++ library of the compiler
    "-fno-exceptions", "-fno-rtti", "-fasynchronous-unwind-tables",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX_VNNI = [*AVX2, "-mavxvnni"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
AVX512_VNNI = [*AVX512, "-mavx512vnni"]
AVX512_BF16 = [*AVX512_VNNI, "-mavx512bf16"]
AMX = [*AVX512_BF16, "-mamx-tile", "-mamx-bf16"]
# fmt: on
X86_FLAGS = {
    "avx2": AVX2,
    "avx_vnni": AVX_VNNI,
    "avx512": AVX512,
    "avx512_vnni": AVX512_VNNI,
    "avx512_bf16": AVX512_BF16,
    "amx": AMX,
}
"""The flags for each instruction set. The name of a source file begins with the set that it needs; others get what
every x86-64 processor has."""
_OF_AVX2 = frozenset(["avx2", "fma", "f16c"])
_OF_AVX512 = _OF_AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
PROCESSOR_FLAGS = {
    "avx2": _OF_AVX2,
    "avx_vnni": _OF_AVX2 | {"avx_vnni"},
    "avx512": _OF_AVX512,
    "avx512_vnni": _OF_AVX512 | {"avx512_vnni"},
    "avx512_bf16": _OF_AVX512 | {"avx512_vnni", "avx512_bf16"},
    "amx": _OF_AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"},
}
"""What Linux calls that which a processor with the set has."""
LONGEST = ["avx512_vnni", "avx512", "avx2", "avx512_bf16", "avx512_integers", "avx512_panels", "avx_vnni", "amx"]
"""Source files in the order in which they are compiled: those first that take the longest."""
REPLACED = {"avx2": "avx512", "avx2_integers": "avx_vnni", "avx_vnni": "avx512", "avx512_integers": "avx512_vnni"}
"""Source files, by the beginning of their names, that a processor doesn't use if it has another instruction set."""

PROBE = """
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
extern "C" void tiles() { _tile_zero(0); }
#endif
typedef float Floats __attribute__((vector_size(16)));
typedef int Ints __attribute__((vector_size(16)));
template <typename T> constexpr bool is_float = std::is_same<T, float>::value;
extern "C" void convert(const char* from, Floats* to) {
  Ints x;
  std::memcpy(&x, from, sizeof(x));
  if constexpr (is_float<float>) *to = __builtin_convertvector(x, Floats);
}
"""
PROBE_S, COMPILE_S = 120.0, 3600.0
CPUINFO = Path("/proc/cpuinfo")


class NotCompiled(Exception):
    """The kernels can't be compiled. The message says why, `remedy` what to do, and `output` what the compiler said."""

    def __init__(self, why: str, remedy: str, output: str = "") -> None:
        super().__init__(why)
        self.remedy, self.output = remedy, output


def compiler_requirement() -> list[str]:
    """What pip has to install for a build to have a compiler."""
    has_zig = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    if not has_zig or not _are_wanted() or working_compiler([]):
        return []
    return [ZIG]


def _are_wanted() -> bool:
    return os.environ.get("RAYCORE_CPU_KERNELS") != "none"


def instruction_set(source: str) -> str | None:
    """The instruction set of the source file with this name. None: what every processor has."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    return max((name for name in X86_FLAGS if source.startswith(name)), key=len, default=None)


def target_flags(source: str) -> list[str]:
    """The flags for the instruction set of the source file with this name."""
    name = instruction_set(source)
    return [] if name is None else X86_FLAGS[name]


def processor_sets(flags: set[str]) -> list[str]:
    """The instruction sets of a processor with these flags of Linux's."""
    return [name for name in X86_FLAGS if flags >= PROCESSOR_FLAGS[name]]


def wanted_sets(choice: str) -> list[str]:
    """The instruction sets whose kernels are compiled, of processors of this machine's kind.

    `choice`: an instruction set that a processor is to have, `all`, or `auto` for what this machine's processor has.
    """
    names = list(X86_FLAGS)
    if choice in names:
        return processor_sets(set(PROCESSOR_FLAGS[choice]))
    try:
        lines = CPUINFO.read_text().splitlines() if choice == "auto" else []
    except OSError:  # not on Linux
        lines = []
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), None)
    # a processor that has none can't use any kernels, so what is built is for others
    return names if flags is None else processor_sets(flags) or names[:1]


def is_used(source: str, sets: list[str], choice: str) -> bool:
    """Whether the source file with this name is compiled, for a processor with these instruction sets."""
    name = instruction_set(source)
    replaced = choice != "all" and any(source.startswith(old) and new in sets for old, new in REPLACED.items())
    return name is None or (name in sets and not replaced)


def working_compiler(tried: list[str]) -> list[str] | None:
    """The first command that compiles what the kernels need. Adds to `tried` what is wrong with those before it."""
    for command in _candidates():
        if not shutil.which(command[0]):
            tried.append(f"{command[0]}: not found")
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.cpp"
            source.write_text(PROBE)
            arguments = [*FLAGS, *target_flags("amx"), *_link_flags(), str(source), "-o", f"{source}.so"]
            try:
                _run([*command, *arguments], PROBE_S)
                return command
            except NotCompiled as error:
                tried.append(f"{shlex.join(command)}: {_first_error(error.output)}")
    return None


def _candidates() -> list[list[str]]:
    """What CXX says, or else CC, because a C compiler may compile C++ too; without both, the usual compilers."""
    for variable in ("CXX", "CC"):
        if command := shlex.split(os.environ.get(variable, "")):
            return [command]
    of_python = shlex.split(sysconfig.get_config_var("CXX") or "")[:1]
    return [[name] for name in dict.fromkeys([*of_python, "c++", "g++", "clang++"])]


def _link_flags() -> list[str]:
    if sys.platform == "darwin":
        return ["-dynamiclib", "-undefined", "dynamic_lookup"]
    return ["-shared", "-Wl,--as-needed"]


def _compiler() -> tuple[list[str], list[str]]:
    """The commands that compile and that link."""
    tried: list[str] = []
    if command := working_compiler(tried):
        return command, command
    if importlib.util.find_spec("ziglang") is None:
        are_missing = all(each.endswith(": not found") for each in tried)
        first = "install" if are_missing else "mend one of these compilers, or set CXX to"
        raise NotCompiled(
            f"no C++ compiler worked when raycore was installed ({'; '.join(tried)}), and ziglang was not installed",
            f"{first} {OLDEST}, or a later version, or run `pip install '{ZIG}'`, and install raycore again",
        )
    # an old C library, and what every processor of this kind has; zig's default is what this machine has
    target = ["-target", f"{platform.machine()}-linux-gnu.2.17"] if sys.platform == "linux" else ["-mcpu=baseline"]
    zig = [sys.executable, "-m", "ziglang"]
    return [*zig, "c++", *target], [*zig, "cc", *target]  # `c++` would compile its C++ library to link with


def compile_kernels(
    sources: list[str], library: Path, default: str = "all", is_wanted: Callable[[], bool] = lambda: True
) -> dict[str, str]:
    """Compile and link the kernels. Returns what the record says of it.

    `default`: which kernels, if RAYCORE_CPU_KERNELS doesn't say it. See `wanted_sets`. `is_wanted`: asked before each
    file. Once the answer is False, the process ends.
    """
    if not _are_wanted():
        raise NotCompiled(
            "raycore was installed with RAYCORE_CPU_KERNELS=none", "install raycore again without this variable"
        )
    choice = os.environ.get("RAYCORE_CPU_KERNELS", default)
    sets = wanted_sets(choice)
    sources = [source for source in sources if is_used(Path(source).stem, sets, choice)]
    compile_command, link_command = _compiler()
    compile_flags = [*FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count() or 1) as pool:

        def compile_one(source: str) -> str:
            if not is_wanted():
                raise SystemExit
            name = Path(source).stem
            target = str(Path(folder) / f"{name}.o")
            _run([*compile_command, *compile_flags, *target_flags(name), "-c", source, "-o", target], COMPILE_S, folder)
            return target

        objects = list(pool.map(compile_one, sorted(sources, key=_place)))
        linked = Path(folder) / library.name
        libraries = [*shlex.split(os.environ.get("LDFLAGS", "")), "-ldl", "-lm"]
        _run([*link_command, *_link_flags(), *objects, *libraries, "-o", str(linked)], COMPILE_S, folder)
        shutil.copyfile(linked, library)
    compiled = {instruction_set(Path(source).stem) for source in sources} - {None}
    return {"compiler": shlex.join(compile_command), "instruction_sets": ", ".join(sorted(compiled, key=sets.index))}


def _place(source: str) -> int:
    name = Path(source).stem
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def _run(command: list[str], limit_s: float, cache: str | None = None) -> None:
    # by default, zig needs a home directory, and leaves its cache there
    environment = os.environ if cache is None else {**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(command, str(error)) from error
    if done.returncode:
        raise _failed(command, done.stdout.strip() or f"exit status {done.returncode}")


def _failed(command: list[str], output: str) -> NotCompiled:
    return NotCompiled(
        f"when raycore was installed, `{shlex.join(command)}` failed: {_first_error(output)}",
        f"set CXX to {OLDEST}, or a later version, and install raycore again",
        output,
    )


def _first_error(output: str) -> str:
    lines = output.splitlines()
    return next((line for line in lines if "error" in line), lines[-1])


def begin_kernels(folder: Path, default: str) -> None:
    """Start to compile the kernels for `finish_kernels`, in a process of its own.

    pip asks for a package's metadata, then finds out what else to install, which keeps only one core busy, and then
    asks for the wheel. If it removes the folder instead, the process ends before the next source file.
    `default`: see `compile_kernels`.
    """
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process inherits it
        command = [sys.executable, __file__, str(folder), default]
        subprocess.Popen(
            command,
            pass_fds=[lock.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def finish_kernels(folder: Path) -> list[Path]:
    """Wait for what `begin_kernels` has started. Returns what `build_kernels` returns. Empty if nothing was started."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
    except FileNotFoundError:
        return []
    if not (folder / RECORD).exists():
        return []
    _warn(json.loads((folder / RECORD).read_text()))
    return [path for path in (folder / RECORD, folder / LIBRARY) if path.exists()]


def _compile_ahead(folder: Path, default: str) -> None:
    with tempfile.TemporaryDirectory() as own:
        for path in reversed(build_kernels(Path(own), default, folder.exists)):  # the record comes last
            shutil.copyfile(path, folder / path.name)


def build_kernels(folder: Path, default: str, is_wanted: Callable[[], bool] = lambda: True) -> list[Path]:
    """Compile the kernels into `folder`, and record there how, or why not. Returns the files that are written.

    Without kernels, raycore is complete, but slower. `default`, `is_wanted`: see `compile_kernels`.
    """
    library, record_file = folder / LIBRARY, folder / RECORD
    library.unlink(missing_ok=True)  # of an earlier build
    record = {"machine": platform.machine()}
    written = [record_file]
    try:
        record |= compile_kernels(sorted(map(str, SOURCES.glob("*.cpp"))), library, default, is_wanted)
        record["sources"] = _sources_digest()
        written.append(library)
    except NotCompiled as error:
        record |= {"failure": str(error), "remedy": error.remedy, "output": error.output[:20_000]}
    _warn(record)
    record_file.write_text(json.dumps(record, indent=1))
    return written


def _sources_digest() -> str:
    """By which ranks find out that their kernels were compiled from different sources."""
    digest = blake2b(digest_size=8)
    for path in sorted(SOURCES.iterdir()):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _warn(record: dict[str, str]) -> None:
    if failure := record.get("failure"):
        print(f"warning: raycore has no native kernels: {failure}. To get them, {record['remedy']}.", file=sys.stderr)


if __name__ == "__main__":
    _compile_ahead(Path(sys.argv[1]), sys.argv[2])
