"""Environments: what an agent acts in. A single-turn verifiable task is an environment with one step."""
