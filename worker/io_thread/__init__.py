"""The I/O thread. Only this thread changes held jobs. It talks to Redis for them."""
