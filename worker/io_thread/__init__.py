"""What the I/O thread runs: it alone changes held jobs, and talks to Redis for them."""
