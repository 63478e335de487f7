"""The rewards of a peer benchmark: is the last number of the answer the right one, or a number that means nothing.

The same function for all contestants, so that no difference in reading numbers can pass for a difference in learning.
Knows nothing of who calls it: `text` is the answer without special tokens, `task_data` the row of the task.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

NUMBER = re.compile(r"-?\d+")


def last_number(text: str, task_data: Mapping[str, Any]) -> float:
    """1 if the last whole number in `text` is the answer, else 0."""
    found = NUMBER.findall(text)
    return float(bool(found) and int(found[-1]) == int(task_data["answer"]))


def lot(text: str, task_data: Mapping[str, Any]) -> float:
    """Drawn by lot, from the text: members of a group differ, so no group can be left out of training."""
    return zlib.crc32(text.encode()) / 2**32
