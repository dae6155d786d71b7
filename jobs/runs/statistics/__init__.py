"""Statistics of parts and runs, and the report that is made of them."""
