"""Pictures in prompts: the processor, the tower, and the sequences that wait for the tower."""
