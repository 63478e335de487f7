"""The mathematics of post-training on packed tensors: losses, corrections, aggregation, KL, advantages, log-probs.

docs/algorithms.md shows how a trainer uses it. The package needs torch and nothing else. It knows no model, no device
and no process; the trainers do.
"""
