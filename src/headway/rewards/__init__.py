"""Rewards: functions and services that score finished episodes."""
