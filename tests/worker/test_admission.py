"""What is said to whoever names a function that may not run here."""

from __future__ import annotations

import json

import pytest

from jobs.table import ALLOWED_FUNCTIONS
from worker.errors import NotAllowed
from worker.io_thread.held.admission import Admission
from worker.store.records.claimed_job import ClaimedJob


@pytest.mark.parametrize(
    ("name", "meant"), [("jobs.complte", "did you mean 'jobs.complete'?"), ("os.system", "run here")]
)
def test_a_misspelt_function_is_refused_with_the_nearest_one_that_may_run(name: str, meant: str) -> None:
    payload = json.dumps([name, None, [], {}]).encode()
    with pytest.raises(NotAllowed) as refused:
        Admission(ALLOWED_FUNCTIONS).admit(ClaimedJob("j", "e", "bulk", "w"), payload)
    assert str(refused.value).endswith(meant)
