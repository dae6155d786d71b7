"""What is counted of parts and told of a run."""
