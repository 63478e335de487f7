"""Where tasks come from."""

from headway.data.base import TaskSource
from headway.data.cursor import Cursor
from headway.data.sources import JsonlSource, ListSource

__all__ = ["Cursor", "JsonlSource", "ListSource", "TaskSource"]
