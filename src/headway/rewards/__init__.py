"""Rewards: a verdict on one finished episode."""
