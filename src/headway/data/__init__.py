"""Tasks for training and validation: read from files, datasets or generators, and given out by position."""

from headway.data.prompts import PromptTokenizer
from headway.data.task_sources import ListSource, SizedSource, TaskCursor, TaskSource
from headway.data.training_data import DataSources, make_sources

__all__ = ["DataSources", "ListSource", "PromptTokenizer", "SizedSource", "TaskCursor", "TaskSource", "make_sources"]
