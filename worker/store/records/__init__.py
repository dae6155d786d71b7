"""A job in RQ's hash, and how it is read and written."""
