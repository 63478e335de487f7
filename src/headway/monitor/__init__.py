"""Everything that is known about a run, computed from its events and from nothing else."""
