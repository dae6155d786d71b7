"""A job as RQ's hash holds it, and what is read and written of it."""
