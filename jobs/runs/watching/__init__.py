"""A run as it is seen from outside: progress, what holds it up, time left."""
