"""Rewards that look at the last picture of an episode."""
