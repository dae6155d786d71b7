"""What a run asks of a row, and which columns the answer has. Each kind of run has its own file."""
