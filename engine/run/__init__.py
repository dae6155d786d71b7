"""The engine's start and steps: its configuration, the runner, its graphs and memory, and the stepper."""
