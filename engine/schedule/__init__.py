"""Schedules steps: sequences, their slots and blocks, and the scheduler that chooses. No torch."""
