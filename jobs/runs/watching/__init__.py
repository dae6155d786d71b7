"""Shows a run from outside: its progress, what holds it up, and the time left."""
