"""What is written to the stream of a followed job's text, and what the next worker gets of it."""

import pytest
from redis import Redis
from rq import Queue

from jobs.common.keys import JOURNAL_TTL_S, STREAM_FIELD
from tests.worker.stores import claim, end_leases, succeeded, take_up_abandoned, worker_store
from worker.store.records.text_piece import NUM_VALUES, TextPiece, sent_tokens

KEY = "tokenmill:text:followed"
FIRST = TextPiece(0, "text", 0, "a\u00e9", 0, [1, 70_000], "me")
SECOND = TextPiece(0, "text", 2, "c", 2, [3], "me")


def test_the_next_worker_gets_the_tokens_of_what_was_sent(redis: Redis, bulk: Queue) -> None:
    job = bulk.enqueue("f", job_id="followed")
    redis.hset(job.key, STREAM_FIELD, "1")
    killed = worker_store(redis, "killed")
    (held,) = claim(killed)
    assert held.pieces == []
    killed.write_texts([(held, FIRST), (held, SECOND)])

    end_leases(redis)
    store = worker_store(redis)
    take_up_abandoned(store, ["bulk"])
    (taken,) = claim(store)
    assert sent_tokens(taken.pieces, "me") == [(0, 0, [1, 70_000]), (0, 2, [3])]
    assert sent_tokens(taken.pieces, "another") == []


def test_a_worker_that_has_lost_its_job_writes_no_text(redis: Redis, bulk: Queue) -> None:
    bulk.enqueue("f", job_id="followed")
    frozen = worker_store(redis, "frozen")
    (held,) = claim(frozen)
    frozen.write_texts([(held, FIRST)])
    end_leases(redis)
    take_up_abandoned(worker_store(redis), ["bulk"])
    frozen.write_texts([(held, SECOND)])
    assert redis.xlen(KEY) == 1


def test_a_text_is_kept_until_its_job_ends(redis: Redis, bulk: Queue) -> None:
    bulk.enqueue("f", job_id="followed")
    store = worker_store(redis)
    (held,) = claim(store)
    store.write_texts([(held, FIRST)])
    assert 0 < redis.ttl(KEY) <= JOURNAL_TTL_S
    store.finish([succeeded(held)])
    assert not redis.exists(KEY)


def test_a_key_that_holds_no_stream_costs_its_own_reader_the_text(
    redis: Redis, bulk: Queue
) -> None:
    bulk.enqueue("f", job_id="followed")
    bulk.enqueue("f", job_id="other")
    redis.set(KEY, "no stream")
    store = worker_store(redis)
    held, other = claim(store)
    assert held.pieces == []
    store.write_texts([(held, FIRST), (other, FIRST)])
    assert redis.xlen("tokenmill:text:other") == 1


@pytest.mark.parametrize("damage", [{b"tokens": b"123"}, {b"sample": b"x"}, {b"owner": b"you"}])
def test_damaged_pieces_are_left_out(damage: dict[bytes, bytes]) -> None:
    values = [
        value if isinstance(value, bytes) else str(value).encode() for value in FIRST.to_values()
    ]
    assert len(values) == NUM_VALUES
    fields = {**dict(zip(values[::2], values[1::2], strict=True)), **damage}
    entry = [b"1-0", [part for pair in fields.items() for part in pair]]
    assert sent_tokens([entry], "me") == []
