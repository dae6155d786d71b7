"""Keeps a run's keys in Redis."""
