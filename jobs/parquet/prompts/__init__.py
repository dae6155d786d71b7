"""Makes a prompt or messages of each row, and reads the row's own sampling values."""
