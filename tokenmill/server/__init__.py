"""OpenAI's API over HTTP: a producer that turns requests into jobs on the queues. It needs `jobs`, but no engine."""
