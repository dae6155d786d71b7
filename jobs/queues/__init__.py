"""RQ's queues: counts their jobs, changes them, puts failed jobs back, and writes metrics for Prometheus."""

from jobs.queues.counts import PLACES as PLACES
from jobs.queues.counts import QueueCounts as QueueCounts
from jobs.queues.counts import count_claimed as count_claimed
from jobs.queues.counts import count_queues as count_queues
from jobs.queues.counts import head_ages as head_ages
from jobs.queues.counts import queue_names as queue_names
from jobs.queues.requeue import REQUEUE_LIMIT as REQUEUE_LIMIT
from jobs.queues.requeue import RESUBMIT as RESUBMIT
from jobs.queues.requeue import Requeued as Requeued
from jobs.queues.requeue import requeue as requeue
from jobs.queues.requeue import requeue_all as requeue_all
