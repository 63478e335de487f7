"""Parts of `benchmarks/images.py`: scorers that cost something, the simulator's word, and prefixes that are shared."""
