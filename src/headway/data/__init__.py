"""Where tasks come from."""

from headway.data.prompts import PromptTokenizer
from headway.data.task_sources import JsonlSource, ListSource, SizedSource, TaskCursor, TaskSource
from headway.data.training_data import DataSources, fingerprint, make_sources

__all__ = [
    "DataSources",
    "JsonlSource",
    "ListSource",
    "PromptTokenizer",
    "SizedSource",
    "TaskCursor",
    "TaskSource",
    "fingerprint",
    "make_sources",
]
