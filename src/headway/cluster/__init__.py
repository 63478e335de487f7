"""Devices of roles, locks on them, peers in the actors of a Ray cluster, and files that start a run on a cluster."""
