"""The documentation site builds without a warning, and no link inside of it is broken."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
BUILD_TIMEOUT_S = 600
"""The build takes a core for most of a minute, and some minutes beside others."""

SPHINX = "import gc, sys; gc.disable(); from sphinx.cmd.build import main; sys.exit(main(sys.argv[1:]))"
"""Without visits of the garbage collector to the documents' trees, which live until the end, it takes half as long."""

pytestmark = pytest.mark.timeout(BUILD_TIMEOUT_S + 60)


class Page(HTMLParser):
    """The links of a page, and the names that links can point to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-c", SPHINX, "-W", "--keep-going", "-n", "-q", "-b", "html", ROOT / "docs", folder]
    built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def test_no_link_within_the_site_is_broken(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 20
    broken: list[str] = []
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            is_found = target.exists() and (target not in pages or unquote(url.fragment) in pages[target].anchors)
            if not is_found:
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_every_public_name_is_in_the_reference(site):
    import raycore

    names = Page(site / "api/engine.html").anchors | Page(site / "api/requests.html").anchors
    documented = {name.rpartition(".")[2] for name in names}
    # it is the placement package's, and documented there
    assert set(raycore.__all__) - documented == {"PlacementShortage"}
