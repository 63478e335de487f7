"""What the children of these tests serve, under vLLM's interpreter: engine after engine over one vLLM.

Imports nothing that only our own environment has.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.engines.vllm.in_process_engine import InProcessEngine
from headway.launch.in_process_engines import make_in_process_engine, make_llm
from headway.processes.parent_watchdog import tie_process_group_to_parent

_made: list[InProcessEngine] = []


async def engine(args: Mapping[str, Any]) -> InProcessEngine:
    """Without weights or requests; the vLLM of the one before it goes on."""
    if not _made:
        _step_back()
        tie_process_group_to_parent()
        core: Any = make_llm(args)
    else:
        before = _made.pop()
        for request_id in list(before._requests):
            await before.abort(request_id)
        await before.resume()
        core = before._core
    found = make_in_process_engine(core, args)
    assert isinstance(found, InProcessEngine)
    _made.append(found)
    return found


def _step_back() -> None:
    """vLLM's processes spin while they wait: on few cores whoever disturbs a request would come when it is over."""
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("8")
