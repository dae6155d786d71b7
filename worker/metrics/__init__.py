"""The worker's HTTP endpoints: /metrics, /livez and /readyz. A request only reads values in memory."""
