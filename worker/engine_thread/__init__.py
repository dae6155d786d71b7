"""The main thread: it steps the engine, with threads of its own for long prompts."""
