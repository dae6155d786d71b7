"""Ways from a prompt to its answer, other than asking the prompt once. Each way has its own file."""
