"""Text in and out: tokenizer, the check of prompts, and the watch for stop strings."""
