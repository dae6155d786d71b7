"""The dashboard in a real browser: nothing for axe to find, and charts that tell their values."""

from collections.abc import Iterator
from shutil import which

import pytest

pytest.importorskip("playwright.sync_api")
pytest.importorskip("axe_playwright_python")

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from ops.documents.scene import Scene
from ops.documents.screens import SCHEMES, WIDTHS, chromium, opened, paths, running_scene
from tests.tokenmill.dashboard.conftest import TOKEN
from tests.tokenmill.dashboard.dashboard_process import running_dashboard

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(which("chromium") is None, reason="chromium is not installed"),
]


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[str, Scene]]:
    """A dashboard's address, and what it shows."""
    with running_scene(num_waiting=1000, past_s=600) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as launched:
        yield launched


def findings(page: Page) -> list[str]:
    """Return what axe finds."""
    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found]


def cells(page: Page, chart: str) -> list[list[str]]:
    """Return the rows of a chart's table."""
    rows = page.query_selector_all(f"[data-chart={chart}] tbody tr")
    return [[each.inner_text() for each in row.query_selector_all("th, td")] for row in rows]


def test_charts_tell_the_values_under_the_pointer_and_what_became_of_workers(
    site: tuple[str, Scene], browser: Browser
) -> None:
    address, _ = site
    said: list[str] = []
    with opened(browser, address, 1440, "light", said) as page:
        assert [row[0] for row in cells(page, "workers")] == ["gpu-1", "gpu-2", "gpu-3", "gpu-5"]
        assert "gpu-5 died" in page.inner_text(".marks")
        latest = cells(page, "waiting")[0][1]
        assert page.inner_text(".moment") == ""
        page.hover("[data-chart=waiting] .u-over", position={"x": 330, "y": 20})
        then = cells(page, "waiting")[0][1]
        assert "UTC" in page.inner_text(".moment")
        assert 0 < number(then) < number(latest), "earlier, less waited"
        assert cells(page, "workers")[0][1] != "–", "the other charts tell of that moment too"

        at_pointer = page.inner_text(".moment")
        page.keyboard.press("ArrowLeft")
        earlier = page.inner_text(".moment")
        page.keyboard.press("ArrowRight")
        assert page.inner_text(".moment") == at_pointer != earlier
        page.keyboard.press("Escape")
        assert page.inner_text(".moment") == ""
        page.keyboard.press("ArrowLeft")
        assert "UTC" in page.inner_text(".moment"), "it begins at the latest moment"

        page.click("[data-range='24h']")
        page.wait_for_function("document.querySelector('[data-range=\"24h\"]').ariaPressed")
        assert "range=24h" in page.url
        assert findings(page) == []
    assert said == [], "the content security policy too lets all of it through"


def number(text: str) -> int:
    return int(text.replace(",", "")) if text != "–" else 0


@pytest.mark.long  # six looks of seconds at each page
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_nothing_on_any_page(
    site: tuple[str, Scene], browser: Browser, width: int, scheme: str
) -> None:
    address, scene = site
    found = {}
    for name, path in paths(scene).items():
        said: list[str] = []
        with opened(browser, f"{address}{path}", width, scheme, said) as page:
            is_sideways = page.evaluate(
                "document.documentElement.scrollWidth > document.documentElement.clientWidth"
            )
            found[name] = [*findings(page), *(["sideways"] if is_sideways else [])]
            if name != "missing":  # of whose status the browser tells
                found[name] += said
    assert {name: each for name, each in found.items() if each} == {}


@pytest.mark.long  # it starts another dashboard
@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_nothing_where_people_log_in(
    redis_url: str, browser: Browser, scheme: str
) -> None:
    with (
        running_dashboard(redis_url, TOKENMILL_DASHBOARD_TOKEN=TOKEN) as address,
        opened(browser, address, 390, scheme) as page,
    ):
        assert findings(page) == []
        page.fill("#token", "wrong")
        page.click("button")
        page.wait_for_selector("#wrong")
        assert findings(page) == []
        page.fill("#token", TOKEN)
        page.click("button")
        page.wait_for_selector("main#main")
        assert findings(page) == []


def test_keys_go_from_row_to_row_and_ticked_jobs_stay_ticked_until_they_are_put_back(
    site: tuple[str, Scene], browser: Browser
) -> None:
    address, _ = site
    said: list[str] = []
    with opened(browser, f"{address}/failed", 1440, "dark", said) as page:

        def focused() -> str:
            return str(page.evaluate("document.activeElement.textContent"))

        page.keyboard.press("j")
        first = focused()
        page.keyboard.press("j")
        assert focused() != first
        page.keyboard.press("k")
        assert focused() == first
        page.keyboard.press("?")
        assert page.is_visible("#help")
        page.keyboard.press("Escape")
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.id") == "search"
        page.keyboard.type("jx?")
        assert page.input_value("#search") == "jx?"
        page.keyboard.press("Escape")

        boxes = page.locator("input[name=job][value*=diskfull]")
        for number in (0, 1):
            boxes.nth(number).check()
        assert page.is_visible(".paused")
        assert page.text_content("[data-delete-ticked]") == "Delete 2 jobs"
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.evaluate("htmx.trigger('#main', 'refresh')")
        assert asked == [], "the list would move beneath the pointer"
        page.click("text=Retry ticked")
        page.wait_for_selector("text=2 put back.")
        assert page.locator("input[name=job]:checked").count() == 0
        assert page.is_hidden(".paused")
        assert page.text_content("[data-delete-ticked]") == "Delete ticked jobs"

        page.click("[data-tick-all]")
        assert page.locator("input[name=job]:checked").count() == 50
        page.hover("time >> nth=0")
        shown = str(page.get_attribute("time >> nth=0", "title"))
        assert shown != page.get_attribute("time >> nth=0", "datetime"), "it is the local time"

        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url("**/failed?group=*")
    assert said == []
