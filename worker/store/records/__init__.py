"""Reads and writes the jobs in RQ's hashes."""
