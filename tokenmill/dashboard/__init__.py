"""`tokenmill dashboard`: web pages of queues, runs, workers and failed jobs. They are made from Redis alone."""
