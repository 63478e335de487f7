"""The ledger of samples: which were started, how each ended, and what a run goes on with after a crash."""

from headway.ledger.ledger import Ledger
from headway.ledger.ledger_restore import RestoredGroup, RestoredRun, rebase_generation, rebase_version
from headway.ledger.ledger_store import is_unused_ledger, list_recorded_checkpoints

__all__ = [
    "Ledger",
    "RestoredGroup",
    "RestoredRun",
    "is_unused_ledger",
    "list_recorded_checkpoints",
    "rebase_generation",
    "rebase_version",
]
