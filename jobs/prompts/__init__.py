"""Jobs of prompts: their arguments, their task, and their responses."""
