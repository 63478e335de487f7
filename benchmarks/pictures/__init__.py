"""Parts of `benchmarks/images.py` and `benchmarks/image_learning.py`."""
