"""OpenAI's HTTP API over the same queues: a producer that speaks HTTP. It imports `jobs` alone."""
