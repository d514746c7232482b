"""Progress bars, as a terminal gets them."""

from __future__ import annotations

import pytest

from raycore.display import progress_bars as bars


def on_screen(written: str) -> str:
    """What a line shows after all that was written to it."""
    shown = ""
    for part in written.split("\r"):
        shown = part + shown[len(part) :]
    return shown.rstrip()


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(bars, "LOADING_BAR_DELAY_S", 1e-9)
    monkeypatch.setattr(bars, "_is_redrawn", lambda: True)
    monkeypatch.setattr(bars.tqdm, "__init__", _unthrottled(bars.tqdm.__init__))


def _unthrottled(init):
    return lambda self, *args, **options: init(self, *args, mininterval=0, **options)


@pytest.mark.usefixtures("at_once")
def test_a_loading_bar_follows_the_progress_and_disappears_at_the_end(capsys):
    written = ""
    with bars.loading_bar(True) as bar:
        for share, shown in ((0.0, "0%"), (0.5, "50%"), (0.25, "25%"), (1.0, "100%")):
            bar.show(share)
            written += capsys.readouterr().err
            assert on_screen(written).startswith(f"Loading: {shown:>4}|")
    assert on_screen(written + capsys.readouterr().err) == ""


def test_loading_progress_in_a_log_is_a_line_now_and_then(monkeypatch, capsys):
    now_s = 100.0
    monkeypatch.setattr(bars.time, "monotonic", lambda: now_s)
    with bars.request_bar(100, True) as bar:
        for done in range(100):
            now_s += 0.2  # 20 s in all
            bar.n = done
            bar.refresh()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("|")[0] for line in lines] == ["Generating:  49%", "Generating:  99%"]


def test_a_fast_start_and_disabled_progress_show_no_bar(capsys):
    for is_shown in (True, False):
        with bars.loading_bar(is_shown) as bar:
            bar.show(0.5)
    assert capsys.readouterr().err == ""
