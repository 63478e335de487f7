"""Parts of `benchmarks/agentic.py`: slow environments, the runs, the simulator's word, many episodes at once."""
