"""Chats with pictures, from a producer to an answer: data: URLs, and files below the data roots."""

from pathlib import Path
from typing import Any

from rq import Queue

from tests.picture_files import BLUE, RED, bomb, data_url, picture
from tests.rq_workers import Workers


def chat(url: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": url}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def test_a_chat_has_its_pictures_where_they_stand(
    workers: Workers, bulk: Queue, tmp_path: Path
) -> None:
    (tmp_path / "blue.png").write_bytes(picture(BLUE))
    jobs = [
        bulk.enqueue("jobs.chat", **chat({"url": data_url(picture(RED)), "detail": "auto"})),
        bulk.enqueue("jobs.chat", **chat(data_url(picture(RED, (40, 20))))),
        bulk.enqueue(
            "jobs.chat", **chat({"url": str(tmp_path / "blue.png")}), check={"regex": ".*"}
        ),
    ]
    broken = bulk.enqueue("jobs.chat", **chat({"url": data_url(bomb())}))
    outside = bulk.enqueue("jobs.chat", **chat({"url": "/etc/passwd"}))
    low = bulk.enqueue("jobs.chat", **chat({"url": data_url(picture(RED)), "detail": "low"}))
    workers.burst("bulk")
    answers = [job.return_value()["choices"][0]["message"]["content"] for job in jobs]
    expected = ["<4x2 255,0,0>", "<40x20 255,0,0>", "<4x2 0,0,255>"]
    assert answers == [f"echo:see {each}" for each in expected]
    for job, says in (
        (broken, "request 0 of this job failed: picture 1 has 50000 x 50000 pixels"),
        (outside, "jobs.errors.PathOutsideRoots: /etc/passwd lies outside the data roots"),
        (low, "detail of a picture of message 0 is 'low', expected 'auto' or 'high'"),
    ):
        assert says in workers.result(job).exc_string
