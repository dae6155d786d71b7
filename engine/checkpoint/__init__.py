"""A model as it lies on disk: its folder, its configuration, its tensors, and what tells it from another."""
