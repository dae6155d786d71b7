"""The dashboard in a real browser, over real workers: what it must show, and screenshots to look at.

`python -m ops.browse` needs Debian's chromium (apt-get install chromium), npm, and
`pip install -c ops/constraints.txt playwright`. It takes some minutes, prints what it saw, and ends
with 1 where something is missing. Screenshots are in ops/out/browse.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from playwright.sync_api import Browser, Page

from ops.browse.browser import SCHEMES, SCREENS, Notes, axe_source, chromium, serious_findings, sideways
from ops.browse.site import ROOT, Site, wait_until

OUT = ROOT / "ops" / "out" / "browse"
TOKEN = "a token for the browser's test"


def number(page: Page, selector: str) -> int:
    """A count that the page shows, without its commas."""
    return int(re.sub(r"\D", "", page.inner_text(selector)) or 0)


def seen(page: Page, condition: Callable[[], bool], told: str, timeout_s: float = 180.0) -> None:
    """Wait until the page shows something, without loading it again."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"the page does not show within {timeout_s:.0f} s: {told}"
        page.wait_for_timeout(200)
    print(f"seen      {told}", flush=True)


def is_there(page: Page, worker: str) -> bool:
    return bool(page.locator("#workers tbody tr", has_text=worker).count() == 1)


def watch_run(page: Page, site: Site, rows: int) -> str:
    """A run of three workers, one of which is killed midway, and a fourth is added; return its id."""
    silent = page.locator("#workers tr.silent")
    for name in ("node-a", "node-b", "node-c"):
        seen(page, partial(is_there, page, name), f"worker {name}")
    run = site.submit(rows_per_shard=100, max_tokens=48, copies=rows // 2000)
    bar = f"#run-{run} progress"
    seen(page, lambda: page.locator(bar).count() == 1, f"run {run}")
    seen(page, lambda: number(page, "#total-waiting") > 10, "jobs that wait")
    first, depth = page.get_attribute(bar, "value"), number(page, "#total-waiting")
    seen(page, lambda: page.get_attribute(bar, "value") != first, "the bar moves")
    seen(page, lambda: number(page, "#total-waiting") < depth, "depth falls")
    site.start_worker("node-d")
    seen(page, lambda: is_there(page, "node-d"), "a worker that was added midway")
    killed = page.locator("#workers tbody tr", has_text="node-a").locator(".state", has_text="busy")
    seen(page, lambda: killed.count() == 1, "the worker that is about to be killed, at work")
    site.end("node-a", kill=True)
    seen(page, lambda: silent.filter(has_text="node-a").count() == 1, "a worker that was killed, as silent")
    assert int(page.get_attribute(bar, "value") or 0) < rows, "the run had ended before a worker was killed"
    return run


def press(page: Page, name: str) -> None:
    """Go to a control by its name with the Tab key alone, and press Enter."""
    named = "[...document.activeElement.childNodes].map((each) => each.textContent).join('').trim()"
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate(f"document.activeElement.getAttribute('aria-label') || {named}") == name:
            page.keyboard.press("Enter")
            return
    raise AssertionError(f"the Tab key does not reach {name!r}")


def cancel_by_keyboard(browser: Browser, page: Page, site: Site) -> None:
    """A job is cancelled from its page, and a run from a browser without scripts."""
    site.enqueue("waits-for-nobody", queue="nobody-listens-here")
    page.goto(f"{site.address}/jobs/waits-for-nobody")
    page.wait_for_timeout(2500)
    press(page, "Cancel this job")
    page.wait_for_timeout(5000)
    assert page.get_by_role("button", name="Cancel job waits-for-nobody").is_visible(), (
        "an update of the page closes what was opened"
    )
    press(page, "Cancel job waits-for-nobody")
    seen(page, lambda: "will not run" in page.inner_text("#notice"), "the notice that a job was cancelled")
    run = site.submit(rows_per_shard=100, max_tokens=48, copies=1, output="cancelled")
    context = browser.new_context(java_script_enabled=False)
    plain = context.new_page()
    plain.goto(f"{site.address}/runs/{run}")
    plain.locator("summary", has_text="Cancel this run").press("Enter")
    plain.screenshot(path=OUT / "cancel-run-no-scripts.png")
    plain.get_by_role("button", name=f"Cancel run {run}").press("Enter")
    plain.wait_for_url("**?done=run-*")
    assert "The run was cancelled:" in plain.inner_text("#notice")
    assert plain.locator(".state", has_text="cancelled").count() == 1
    context.close()
    print("seen      a run that was cancelled by keyboard in a browser without scripts", flush=True)


def retry_by_keyboard(page: Page, site: Site) -> None:
    """A failed job is put back with the keyboard alone, and succeeds."""
    missing = site.enqueue_failing("waits-for-a-file")
    button = page.get_by_role("button", name="Retry job waits-for-a-file")
    seen(page, lambda: button.count() == 1, "a failed job, with a button to retry it")
    missing.write_text("here")
    press(page, "Retry job waits-for-a-file")
    seen(page, lambda: "1 job put back" in page.inner_text("#notice"), "the notice that it was put back")
    wait_until(lambda: site.redis.zscore("rq:finished:prompts", "waits-for-a-file"), "the retried job ends")
    seen(page, lambda: button.count() == 0, "no failed job any more")


def restart_redis(page: Page, site: Site) -> None:
    before = page.inner_text("#total-waiting")
    site.end("redis")
    seen(page, lambda: "Redis does not answer" in page.inner_text("#problem"), "that Redis is away")
    assert page.locator("#total-waiting").count() == 1, "what was shown is gone"
    site.start_redis()
    seen(page, lambda: page.inner_text("#problem") == "", f"that Redis is back (waiting {before} before)")


def restart_dashboard(page: Page, site: Site, notes: Notes) -> None:
    noted = len(notes.console)
    site.end("dashboard")
    seen(page, lambda: page.locator("#offline").is_visible(), "that the dashboard does not answer")
    site.start_dashboard()
    seen(page, lambda: not page.locator("#offline").is_visible(), "that it answers again")
    page.wait_for_timeout(1000)
    # A browser notes each request that finds nobody, and htmx too: these, and no others.
    told = [
        each
        for each in notes.console[noted:]
        if not re.search(r"ERR_|htmx:(sendError|timeout|afterRequest)", each)
    ]
    notes.console[noted:] = told


def look(browser: Browser, site: Site, notes: Notes, axe: str, paths: dict[str, str]) -> list[str]:
    """Take a picture of each page on each screen in each colour; return what is wrong there."""
    wrong = []
    for screen, (width, height) in SCREENS.items():
        for scheme in SCHEMES:
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            notes.listen(page)
            for name, path in paths.items():
                page.goto(site.address + path)
                page.wait_for_timeout(2500)  # an update has come, and the charts are drawn
                page.screenshot(path=OUT / f"{name}-{screen}-{scheme}.png", full_page=True)
                place = f"{name}, {screen}, {scheme}"
                wrong += [f"{place}: {each}" for each in serious_findings(page, axe)]
                if sideways(page):
                    wrong.append(f"{place}: wider than the screen")
            notes.look_at_sockets()
            context.close()
    return wrong


def check_login(browser: Browser, axe: str) -> list[str]:
    """With a token the page is shown after a login, and not before."""
    with tempfile.TemporaryDirectory(prefix="browse-") as folder:
        site = Site(Path(folder), TOKENMILL_DASHBOARD_TOKEN=TOKEN)
        try:
            site.start_redis()
            site.start_dashboard()
            page = browser.new_page(viewport={"width": 390, "height": 844})
            page.goto(site.address)
            wrong = [f"login: {each}" for each in serious_findings(page, axe)]
            page.screenshot(path=OUT / "login-phone-light.png")
            page.fill("#token", "not the token")
            page.keyboard.press("Enter")
            page.wait_for_selector("#wrong")
            page.fill("#token", TOKEN)
            page.keyboard.press("Enter")
            page.wait_for_selector("#total-waiting")
            page.close()
            return wrong
        finally:
            site.close()


def browse(browser: Browser, site: Site, axe: str, rows: int) -> list[str]:
    """Do and see all of it; return what is wrong."""
    notes = Notes(site.address)
    site.start_redis()
    site.start_dashboard()
    wrong = look(browser, site, notes, axe, {"empty": "/"})
    names = ("node-a", "node-b", "node-c")
    for name in names:
        site.start_worker(name)
    for name in names:
        site.wait_for_worker(name)
    page = browser.new_page(viewport={"width": 1360, "height": 900})
    notes.listen(page)
    page.goto(site.address)
    page.evaluate("window.opened = true")
    run = watch_run(page, site, rows)
    retry_by_keyboard(page, site)
    restart_redis(page, site)
    restart_dashboard(page, site, notes)
    site.redis.rpush("rq:queue:lonely", *range(40))
    site.redis.sadd("rq:queues", "rq:queue:lonely")
    (site.data / "missing").unlink()
    site.enqueue_failing("one-that-failed")
    paths = {"overview": "/", "failed": "/failed", "run": f"/runs/{run}", "job": "/jobs/one-that-failed"}
    wrong += look(browser, site, notes, axe, paths)
    done = page.locator(f"#run-{run}", has_text="finished")
    seen(page, lambda: done.count() == 1, "the run is finished", timeout_s=1800)
    seen(page, lambda: f"{rows:,} of {rows:,}" in page.inner_text(f"#run-{run}"), "all of its rows")
    site.check_output(rows)
    print("seen      each row of the output once and in order", flush=True)
    assert page.evaluate("window.opened"), "the page was loaded again"
    cancel_by_keyboard(browser, page, site)
    notes.look_at_sockets()
    wrong += [f"console: {each}" for each in notes.console]
    wrong += [f"a request to {each}" for each in notes.requests]
    wrong += [f"a connection to {each}" for each in sorted(notes.peers)]
    return wrong


def main() -> None:
    """Exit with 1 where something is missing or wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=28000, help="of the run, in thousands of two")
    parser.add_argument("--chromium", default=shutil.which("chromium") or "/usr/bin/chromium")
    options = parser.parse_args()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="browse-") as folder, chromium(options.chromium) as browser:
        axe = axe_source(Path(folder))
        site = Site(Path(folder))
        try:
            wrong = browse(browser, site, axe, options.rows)
        finally:
            site.close()
        wrong += check_login(browser, axe)
    print("\n".join(wrong) or f"nothing is wrong; look at the pictures in {OUT.relative_to(ROOT)}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
