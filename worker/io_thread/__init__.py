"""The I/O thread: it alone changes held jobs, and talks to Redis for them."""
