"""The jobs that this worker holds, each with its state."""
