"""What every room uses and what needs none of them: our Redis keys, how values are read and shown."""
