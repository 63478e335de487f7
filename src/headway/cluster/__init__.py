"""Devices: which role has which, and who may use shared ones now."""
