"""One step of the model on this rank: its inputs, its graphs, its tokens."""
