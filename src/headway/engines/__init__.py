"""Rollout engines: whatever turns a request into actions with behaviour log-probabilities."""
