"""Takes dashboard.png: Ray's own dashboard, with the actors of an engine of two data-parallel ranks of two workers.

Needs playwright, and a Chromium that it is told of. The page asks for a token, unless the local Ray wants none:

    RAY_AUTH_MODE=disabled python docs/dashboard_picture.py /usr/bin/chromium
"""

import sys
from pathlib import Path

import ray
from playwright.sync_api import sync_playwright

from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path

PICTURE = Path(__file__).with_name("dashboard.png")
COLUMNS = ["Class", "Repr", "State", "Uptime", "PID", "CPU", "Memory", "Placement group ID", "Required resources"]
"""The others are empty here, or ids and addresses of the machine."""

SHOW_ONLY = """columns => {
    for (const table of document.querySelectorAll("table")) {
        const names = [...table.querySelectorAll("thead th")].map(cell => cell.innerText.trim());
        for (const row of table.rows)
            [...row.cells].forEach((cell, i) => { if (!columns.includes(names[i])) cell.remove(); });
    }
}"""
TIMEOUT_MS = 120_000


def main(chromium: str) -> None:
    """Start a Ray with a dashboard, an engine in it, and a browser."""
    context = ray.init(address="local", num_cpus=8, include_dashboard=True, log_to_driver=False)
    with (
        LLM(demo_model_path(), data_parallel_size=2, tensor_parallel_size=2, standby_delay_s=None) as llm,
        sync_playwright() as playwright,
    ):
        llm.generate(["27 + 58 ="] * 64, SamplingParams(max_tokens=64, ignore_eos=True), use_tqdm=False)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 900})
        page.goto(f"http://{context.dashboard_url}/#/actors", timeout=TIMEOUT_MS)
        page.get_by_text("WorkerActor").nth(3).wait_for(timeout=TIMEOUT_MS)
        # memory and CPU come later
        page.wait_for_function("() => !document.body.innerText.includes('NaN')", timeout=TIMEOUT_MS)
        page.evaluate(SHOW_ONLY, COLUMNS)
        page.locator("table").screenshot(path=PICTURE)
        browser.close()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
