"""The held jobs of this worker, each with its state."""
