"""The batching RQ worker: `rq worker --worker-class worker.BatchWorker -S json <queues>`. Imports nothing heavy."""

import logging

from worker.batch_worker import BatchWorker
from worker.errors import WorkerError
from worker.start import RedisErrorsInOneLine

# The filter is added here, because RQ's command connects to Redis before it makes a worker.
logging.getLogger().addFilter(RedisErrorsInOneLine())

__all__ = ["BatchWorker", "WorkerError"]
