"""What a run says about its machine."""

from __future__ import annotations

import platform

from headway.monitor.machine_facts import describe_machine


def test_the_machine_is_told_in_words_that_an_event_can_hold() -> None:
    machine = describe_machine()
    assert "CPU core" in machine and platform.python_version() in machine
