"""RQ's own tests of what becomes of jobs hold for BatchWorker, but for the departures in the table."""

from pathlib import Path

import pytest

from tests.rq_suite.runner import run
from tests.rq_suite.sdist import CannotFetch, rq_tests
from tests.rq_suite.table import CHOSEN, DEPARTURES

PAGE = Path(__file__).parents[2] / "docs/operator.md"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_rq_itself_is_content_with_batch_worker_in_the_place_of_its_workers() -> None:
    try:
        suite = rq_tests()
    except CannotFetch as error:
        pytest.skip(f"RQ's sdist cannot be fetched: {error}")
    summary = run(suite, CHOSEN, slow=False, together=True)
    assert not summary.wrong, summary.text()
    assert len(summary.passed) >= 40, summary.text()


def test_every_departure_from_rq_is_documented() -> None:
    text = " ".join(PAGE.read_text().split())
    assert [why for why in DEPARTURES if why not in text] == []
