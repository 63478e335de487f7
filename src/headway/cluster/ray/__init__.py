"""Peers in the actors of a Ray cluster. Needs the extra `ray`, which nothing outside this package imports."""
