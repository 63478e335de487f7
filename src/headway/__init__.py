"""Headway: asynchronous RL post-training in which rollout runs ahead of training by a bounded distance."""

__version__ = "0.1.0"
