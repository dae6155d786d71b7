"""A model on disk: its folder, its configuration, its tensors and its identity."""
