"""The ledger of samples: which were started, how each ended, and what a run goes on with after a crash."""

from headway.ledger.ledger import Ledger
from headway.ledger.ledger_restore import RestoredGroup, RestoredRun, rebase_generation, rebase_version
from headway.ledger.ledger_store import find_newest_checkpoint

__all__ = ["Ledger", "RestoredGroup", "RestoredRun", "find_newest_checkpoint", "rebase_generation", "rebase_version"]
