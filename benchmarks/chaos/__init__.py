"""Parts of the chaos benchmark: runs and their processes, ways to hurt them, and what must be true afterwards."""
