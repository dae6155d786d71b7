"""Calls that are answered at once: the jobs behind them, and their streams."""
