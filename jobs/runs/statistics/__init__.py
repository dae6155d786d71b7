"""Statistics of parts and runs, and the report made of them."""
