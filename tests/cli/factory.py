"""Files that the tests of the command line use."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = str(EXAMPLES / "simulate_small.yaml")
TINY = (SMALL, "rollout_batch_size=4", "num_return_sequences_in_group=2")
"""Arguments of a run that takes no time to speak of."""
