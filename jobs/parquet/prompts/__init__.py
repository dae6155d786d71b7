"""Makes of each row what it asks: its prompt or messages, and its own sampling values."""
