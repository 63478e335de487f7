"""Trainers and the scorers that look at samples with a model: log-probabilities, reference, values."""
