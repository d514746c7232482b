"""Links between the repository's pages lead somewhere on GitHub. `test_documentation.py` says the same of the site."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^(```+|~~~+|:::+).*?^\1", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def prose(text: str) -> str:
    """A page's text without blocks of code, in which nothing is a link or a heading."""
    return FENCE.sub("", text)


def links(text: str) -> list[str]:
    """The targets of a page's links and images within the repository."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(text)))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """The names that GitHub gives a page's headings."""
    headings = re.findall(r"^#{1,6} (.+)$", prose(text), re.MULTILINE)
    shown = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower() for heading in headings]
    counts: Counter[str] = Counter()
    found: set[str] = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for heading in shown:
        name = re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")
        found.add(f"{name}-{counts[name]}" if counts[name] else name)
        counts[name] += 1
    return found


@cache
def read(path: Path) -> str:
    return path.read_text()


def problem(page: Path, target: str) -> str | None:
    """What is wrong with a link on GitHub; None: nothing."""
    name, _, anchor = target.partition("#")
    path = (page.parent / name).resolve() if name else page
    if not path.exists():
        return "no such file"
    if path.suffix == ".md" and not prose(read(path)).strip():
        return "on GitHub, that page is empty: link to the file that it includes"
    if anchor and path.suffix == ".md" and anchor not in anchors(read(path)):
        return "no such heading"
    return None


def test_every_link_between_pages_leads_somewhere_on_github():
    found = [(page, target) for page in pages() for target in links(read(page))]
    assert len(found) > 100
    broken = [f"{page.relative_to(ROOT)}: {target}: {why}" for page, target in found if (why := problem(page, target))]
    assert broken == []


def test_the_check_finds_broken_links(tmp_path: Path):
    (tmp_path / "whole.md").write_text("# A *heading*: `x_y`, [z](a.md)\n# Twice\n# Twice\n")
    (tmp_path / "hollow.md").write_text("```{include} ../README.md\n```\n")
    page = tmp_path / "page.md"
    page.write_text("[a](whole.md#a-heading-x_y-z)\n[b](whole.md#twice-1) `[c](code.md)` [d](https://e.org)\n")
    assert links(page.read_text()) == ["whole.md#a-heading-x_y-z", "whole.md#twice-1"]
    for target, why in (
        *((each, None) for each in links(page.read_text())),
        ("nothing.md", "no such file"),
        ("whole.md#other", "no such heading"),
        ("whole.md#twice-2", "no such heading"),
        ("hollow.md", "on GitHub, that page is empty: link to the file that it includes"),
    ):
        assert problem(page, target) == why
