"""Trainers, and scorers that compute log-probabilities, reference log-probabilities or values of samples."""
