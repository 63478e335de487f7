"""One template and one model for all runs of a session, as in `tests.runs`."""

from tests.runs.conftest import runs

__all__ = ["runs"]
