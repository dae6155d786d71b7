"""What a run asks of a row, and what comes of it: one file for each kind."""
