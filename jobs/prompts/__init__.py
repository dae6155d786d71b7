"""Jobs of prompts: what they may ask, their task, and the responses that they return."""
