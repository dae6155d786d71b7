"""Threads for calls that may block. Such a call can be interrupted, or given up."""
