"""Takes pictures of the dashboard: python -m ops.documents.screens [--out FOLDER].

It fills a Redis of its own with the scene of scene.py, starts the dashboard, and looks at each page in Chromium, at
three widths, light and dark. With --docs it only writes the pictures that docs/ shows.
"""

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import which

import click
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from redis import Redis
from redis.exceptions import RedisError

from ops.documents.blocks import ROOT
from ops.documents.scene import Scene
from tests.redis_server import running_redis_server
from tests.tokenmill.dashboard.dashboard_process import running_dashboard

WIDTHS = (390, 820, 1440)
SCHEMES = ("light", "dark")
IMAGES = ROOT / "docs" / "images"

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")


#: What docs/images has: the page, the width and height of the window, and the colours.
PICTURES = {
    "dashboard": ("overview", 1280, 1130, "light"),
    "dashboard-failed": ("failed", 1280, 640, "light"),
    "dashboard-queue": ("queue", 1280, 900, "dark"),
}


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), default=Path("screens"), show_default=True)
@click.option("--waiting", default=100_000, show_default=True, help="How many jobs wait.")
@click.option("--docs", is_flag=True, help="Write the pictures of docs/images.")
def main(out: Path, waiting: int, docs: bool) -> None:
    """Write the pictures."""
    with running_scene(waiting) as (address, scene), chromium() as browser:
        pages = paths(scene)
        if docs:
            for name, (of, width, height, scheme) in PICTURES.items():
                with opened(browser, f"{address}{pages[of]}", width, scheme, height=height) as page:
                    picture = Image.open(io.BytesIO(page.screenshot()))
                    picture.save(IMAGES / f"{name}.webp", quality=80, method=6)
            return
        out.mkdir(parents=True, exist_ok=True)
        for width in WIDTHS:
            for scheme in SCHEMES:
                for name, path in pages.items():
                    with opened(browser, f"{address}{path}", width, scheme) as page:
                        page.screenshot(path=out / f"{name}-{width}-{scheme}.png", full_page=True)


@contextmanager
def running_scene(num_waiting: int, past_s: int = 3600) -> Iterator[tuple[str, Scene]]:
    """Start a Redis with the scene and a dashboard; yield its address."""
    with running_redis_server() as url, Redis.from_url(url) as connection:
        scene = Scene(connection)
        scene.write(num_waiting, past_s)
        with running_dashboard(url) as address, kept_alive(scene):
            yield address, scene


@contextmanager
def kept_alive(scene: Scene) -> Iterator[None]:
    """Have the living workers of the scene tell of themselves every two seconds."""
    is_over = threading.Event()

    def tell() -> None:
        while not is_over.wait(2):
            with suppress(RedisError):  # a full one refuses what workers tell too
                scene.keep_alive()

    scene.keep_alive()
    thread = threading.Thread(target=tell)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def paths(scene: Scene) -> dict[str, str]:
    """Return the pages by a name."""
    return {
        "overview": "/",
        "runs": "/runs",
        "run": f"/runs/{scene.runs['running']}",
        "run-refused": f"/runs/{scene.runs['refused']}",
        "queues": "/queues",
        "queue": "/queues/bulk",
        "workers": "/workers",
        "worker": "/workers/gpu-1",
        "worker-dead": "/workers/gpu-5",
        "failed": "/failed",
        "job": "/jobs/diskfull-000",
        "batches": "/batches",
        "actions": "/actions",
        "search": "/search?q=disk",
        "missing": "/nowhere",
    }


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the Chromium of this machine."""
    executable = which("chromium")
    if executable is None:
        sys.exit("no chromium found: install the package chromium (Debian, Ubuntu)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(
    browser: Browser,
    address: str,
    width: int,
    scheme: str,
    said: list[str] | None = None,
    height: int = 900,
) -> Iterator[Page]:
    """Open a page, and wait until its charts are drawn. said: is given the browser's errors and warnings."""
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
    )
    if said is not None:
        page.on("console", lambda each: said.append(each.text) if each.type != "log" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
    try:
        page.goto(address)
        if page.query_selector("#charts"):
            page.wait_for_selector("#charts:not([hidden])")
        yield page
    finally:
        page.close()


if __name__ == "__main__":
    main()
