"""Where tasks come from."""

from headway.data.base import SizedSource, TaskSource
from headway.data.cursor import Cursor
from headway.data.making import Sources, fingerprint, make_sources
from headway.data.prompts import Tokenizer
from headway.data.sources import JsonlSource, ListSource

__all__ = [
    "Cursor",
    "JsonlSource",
    "ListSource",
    "SizedSource",
    "Sources",
    "TaskSource",
    "Tokenizer",
    "fingerprint",
    "make_sources",
]
