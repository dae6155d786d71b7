"""The batching RQ worker: `rq worker --worker-class worker.BatchWorker -S json <queues>`.

Importing this package loads no torch, transformers or pyarrow, and no model.
"""

from worker.batch_worker import BatchWorker
from worker.errors import WorkerError

__all__ = ["BatchWorker", "WorkerError"]
