"""What a worker serves of itself over HTTP: /metrics for Prometheus, /livez and /readyz for its supervisor.

Nothing here asks Redis, the engine, or for a lock of theirs: a request reads plain values that the worker's
threads have left. prometheus-client is imported where a port is set, and not otherwise.
"""
