"""Reads from Redis what only the dashboard shows. What other programs show as well is read in `jobs`."""
