"""Threads for calls that may block; such a call can be interrupted or given up."""
