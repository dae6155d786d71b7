"""One step after another: the start's configuration, the runner, its graphs and memory, and the stepper."""
