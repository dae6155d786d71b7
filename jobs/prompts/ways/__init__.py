"""Ways by which several requests lead to the answer of a prompt. Each way has its own file."""
