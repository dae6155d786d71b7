"""What is checked before a model is loaded."""
