"""RQ's keys, hashes and private behaviour: jobs as this worker claims, holds and ends them.

Another release of RQ changes this package and `worker/batch_worker.py` alone. The scripts in `lua/` derive keys from
job ids, so they need a server that is not sharded. Redis 6.2 or later.
"""
