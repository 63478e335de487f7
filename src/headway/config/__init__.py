"""Configuration: one tree of typed dataclasses, validated when it is made."""
