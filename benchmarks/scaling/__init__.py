"""The published scaling tables of ROLL Flash, replayed with the real flow on the virtual clock."""
