"""The engine: vLLM in this process or behind HTTP, and what runs inside its workers."""
