"""The keys that jobs of a queue, or of all queues, share, and the type of each. A `lock` is a string that
ends by itself. What is of another type there somebody else wrote: workers set it aside."""

from __future__ import annotations

from .keys import QUARANTINE

#: Of all queues.
SHARED = (
    ("stream", QUARANTINE),
    ("set", "rq:queues"),
    ("set", "rq:workers"),
    ("set", "rq:groups"),
    ("set", "rq:rl-keys"),
)

#: Of a queue by its name.
OF_A_QUEUE = (
    ("list", "rq:queue:{}"),
    ("list", "rq:queue:{}:intermediate"),
    ("zset", "rq:wip:{}"),
    ("zset", "rq:finished:{}"),
    ("zset", "rq:failed:{}"),
    ("zset", "rq:deferred:{}"),
    ("zset", "rq:scheduled:{}"),
    ("zset", "rq:canceled:{}"),
    ("set", "rq:workers:{}"),
    ("hash", "tokenmill:held:{}"),
    ("lock", "tokenmill:maintenance:{}"),
    ("lock", "tokenmill:maintenance-stock:{}"),
    ("lock", "rq:clean_registries:{}"),
    ("lock", "rq:scheduler-lock:{}"),
)
