"""The book of samples: what was started, how it ended, and what a run goes on with after a crash."""

from headway.ledger.ledger import Ledger
from headway.ledger.restore import Restored, RestoredGroup, rebased, rebased_generation
from headway.ledger.store import newest_of

__all__ = ["Ledger", "Restored", "RestoredGroup", "newest_of", "rebased", "rebased_generation"]
