"""The worker's HTTP endpoints, /metrics, /livez and /readyz: a request reads plain values and asks nobody."""
