"""The book of samples: what was started, how it ended, and what a run goes on with after a crash."""

from headway.ledger.ledger import Ledger
from headway.ledger.restore import Restored, RestoredGroup, rebased, rebased_generation

__all__ = ["Ledger", "Restored", "RestoredGroup", "rebased", "rebased_generation"]
