"""What the main thread runs: it steps the engine, with threads of its own for long prompts."""
