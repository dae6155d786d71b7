"""Pictures in prompts: the processor's side, the tower's, and the sequences that wait for it."""
