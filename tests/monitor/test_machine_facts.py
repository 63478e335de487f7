"""What a run says about its machine."""

from __future__ import annotations

import json
import platform

from headway import __version__
from headway.monitor.machine_facts import describe_machine


def test_the_machine_is_told_in_words_that_an_event_can_hold() -> None:
    facts = describe_machine()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["headway"] == __version__
    assert "CPU core" in facts["machine"] and platform.python_version() in facts["machine"]
