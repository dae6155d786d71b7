"""OpenAI's response objects, made of completions."""
