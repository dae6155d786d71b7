"""RQ's keys, hashes and private behaviour: how this worker claims, holds and ends jobs in Redis.

A new release of RQ changes only this package and `worker/batch_worker.py`. The scripts in `lua/` derive keys from job
ids, so the server may not be a cluster. It must be Redis 6.2 or later.
"""
