"""Tables as they are read, in child processes, and the values of their columns."""
