"""Parts of `benchmarks/agentic.py`: slow environments, measured runs, the simulator's prediction, many episodes."""
