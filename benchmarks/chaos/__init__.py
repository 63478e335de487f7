"""Parts of the chaos benchmark: runs and their processes, faults, and checks of what must hold afterwards."""
