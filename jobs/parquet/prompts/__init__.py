"""What a row asks: its prompt or messages, and its own sampling values."""
