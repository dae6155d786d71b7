"""RQ's keys, hashes and private behaviour: how this worker claims, holds and ends jobs in Redis.

For a new release of RQ, only this package and `worker/batch_worker.py` need changes. The server must be Redis 6.2 or
later. It may not be a cluster, because the scripts in `lua/` derive keys from job ids.
"""
