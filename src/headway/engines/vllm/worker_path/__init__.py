"""What a launched vLLM imports in its own environment: this directory is on its path, with nothing else in it."""
