"""Rollout: the hub in front of the engines, the agents that use it, and the loop that keeps them fed."""
