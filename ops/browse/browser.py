"""Debian's Chromium, driven by Playwright, and what is noted of everything that it does."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from playwright.sync_api import Browser, Page, sync_playwright

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

#: Width and height of the screens that are looked at, and the colours.
SCREENS = {"desktop": (1360, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")

AXE_VERSION = "4.14.1"


@dataclass
class Notes:
    """console: errors and warnings. requests: addresses other than the dashboard's. peers: addresses on other
    machines that the browser's processes were connected with."""

    address: str
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    peers: set[str] = field(default_factory=set)

    def listen(self, page: Page) -> None:
        page.on("console", self._note_console)
        page.on("pageerror", lambda error: self.console.append(f"exception: {error}"))
        page.on("request", lambda request: self._note_request(request.url))

    def look_at_sockets(self) -> None:
        for process in psutil.Process().children(recursive=True):
            try:
                connections = process.net_connections("inet") if "chrom" in process.name() else []
            except psutil.Error:
                continue
            self.peers |= {
                each.raddr.ip for each in connections if each.raddr and not _is_local(each.raddr.ip)
            }

    def _note_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.console.append(f"{message.type}: {message.text}")

    def _note_request(self, url: str) -> None:
        place = urlsplit(url)
        if place.scheme != "data" and f"{place.scheme}://{place.netloc}" != self.address:
            self.requests.append(url)


def _is_local(ip: str) -> bool:
    return ip.startswith("127.") or ip in ("::1", "::ffff:127.0.0.1")


@contextmanager
def chromium(executable: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        yield browser
        browser.close()


def axe_source(folder: Path) -> str:
    """Return axe-core's script, from npm."""
    command = ["npm", "pack", "--silent", f"axe-core@{AXE_VERSION}"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    archive = folder / f"axe-core-{AXE_VERSION}.tgz"
    subprocess.run(["tar", "xzf", archive, "package/axe.min.js"], cwd=folder, check=True)
    return (folder / "package" / "axe.min.js").read_text()


def serious_findings(page: Page, axe: str) -> list[str]:
    """Return what axe-core finds serious or critical, and each control that cannot be told by its name."""
    page.evaluate(f"{axe};0")
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['impact']}: {each['id']}: {each['nodes'][0]['html'][:120]}"
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]


def sideways(page: Page) -> bool:
    """Whether the page as a whole has to be moved sideways to be read."""
    return bool(page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))
