"""What a vLLM that we start imports, in its own environment: this directory is on its path, with nothing else in it."""
