"""The keys that jobs of a queue, or of all queues, share, and the type of each. A `lock` is a string that
ends by itself. What is of another type there somebody else wrote: workers set it aside."""

from __future__ import annotations

from jobs.common.keys import QUARANTINE, prefixed

#: Of all queues.
SHARED = (
    ("stream", QUARANTINE),
    ("set", prefixed("rq:queues")),
    ("set", prefixed("rq:workers")),
    ("set", prefixed("rq:groups")),
    ("set", prefixed("rq:rl-keys")),
)

#: Of a queue by its name.
OF_A_QUEUE = (
    ("list", prefixed("rq:queue:%s")),
    ("list", prefixed("rq:queue:%s:intermediate")),
    ("zset", prefixed("rq:wip:%s")),
    ("zset", prefixed("rq:finished:%s")),
    ("zset", prefixed("rq:failed:%s")),
    ("zset", prefixed("rq:deferred:%s")),
    ("zset", prefixed("rq:ready:%s")),
    ("zset", prefixed("rq:scheduled:%s")),
    ("zset", prefixed("rq:canceled:%s")),
    ("set", prefixed("rq:workers:%s")),
    ("hash", prefixed("tokenmill:held:%s")),
    ("zset", prefixed("tokenmill:fleet:%s")),
    ("lock", prefixed("tokenmill:maintenance:%s")),
    ("lock", prefixed("tokenmill:maintenance-stock:%s")),
    ("lock", prefixed("rq:clean_registries:%s")),
    ("lock", prefixed("rq:scheduler-lock:%s")),
)
