"""The I/O thread, which claims and holds jobs. Only this thread changes held jobs."""
