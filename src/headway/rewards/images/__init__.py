"""Rewards that look at a picture: the last image of an episode."""
