"""`raycore completion`: scripts that shells accept, and what they complete."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from raycore.cli.main import main

CHECKS = {"bash": ["-n"], "zsh": ["-n"], "fish": ["--no-execute"]}


@pytest.fixture
def script(tmp_path, capsys):
    """Writes a shell's script, and gives its path."""

    def write(shell: str) -> str:
        assert main(["completion", shell]) == 0
        path = tmp_path / f"raycore.{shell}"
        path.write_text(capsys.readouterr().out)
        return str(path)

    return write


@pytest.mark.parametrize("shell", CHECKS)
def test_each_shell_accepts_its_completion_script(shell, script):
    path = script(shell)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} isn't installed")
    run = subprocess.run([shell, *CHECKS[shell], path], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ru"], ["run-batch"]),
        (["serve", "--max-num"], ["--max-num-batched-tokens", "--max-num-seqs"]),
        (["serve", "--scheduling-policy", ""], ["fcfs", "priority"]),
        (["completion", "b"], ["bash"]),
        (["serve", "--chat-template", "pyproj"], ["pyproject.toml"]),
        (["serve", "--trust-remote"], []),
    ],
)
def test_bash_completes_commands_flags_and_values(words, found, script):
    line = " ".join(f"'{word}'" for word in ["raycore", *words])
    commands = f"source {script('bash')}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_raycore 2>/dev/null"
    run = subprocess.run(
        ["bash", "-c", f'{commands}; printf "%s\\n" "${{COMPREPLY[@]}}"'],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert sorted(run.stdout.split()) == found


def test_an_unknown_shell_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["completion", "csh"])
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err
