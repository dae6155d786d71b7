"""The table of all models that transformers knows: see __main__.py."""
