"""The main thread: it steps the engine. Further threads prepare long prompts for it."""
