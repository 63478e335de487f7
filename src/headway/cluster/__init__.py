"""Which role has which devices, which role may use shared ones now, and peers in the actors of a Ray cluster."""
