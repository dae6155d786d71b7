"""A run as it is seen from outside: progress, obstacles, time left, trials."""
