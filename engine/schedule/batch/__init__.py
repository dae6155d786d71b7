"""The batch of one step, as the scheduler made it and as the runner takes it."""
