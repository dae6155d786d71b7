"""`tokenmill dashboard`: one page of what waits, what runs, how fast and what fails, from Redis alone."""
