"""How a request becomes sequences."""
