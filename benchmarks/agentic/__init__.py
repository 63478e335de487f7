"""Parts of `benchmarks/agentic.py`: environments that take their time, the runs, the simulator's word, many episodes."""
