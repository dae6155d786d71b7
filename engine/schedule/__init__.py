"""What each step computes: sequences, their slots and blocks, and the scheduler that chooses among them. No torch."""
