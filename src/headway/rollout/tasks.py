"""Starting tasks in a task group that may be ending."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def spawn(group: asyncio.TaskGroup, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None] | None:
    """A task of `group`, or nothing if the group is being torn down: then what it would do is no longer wanted."""
    try:
        return group.create_task(coroutine, name=name)
    except RuntimeError:
        coroutine.close()
        return None
