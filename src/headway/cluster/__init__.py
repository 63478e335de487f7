"""Devices of roles, locks on shared devices, and peers in the actors of a Ray cluster."""
