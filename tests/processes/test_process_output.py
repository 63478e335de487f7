"""What is kept of the output of a process."""

from __future__ import annotations

import asyncio
import os

from headway.processes.process_output import ProcessOutput


def test_last_lines_do_not_wait_for_a_process_that_never_came() -> None:
    """A start that is cancelled leaves a pipe whose writing end is still open here."""
    output = ProcessOutput(limit=1000)
    assert output.read_last_lines() == ""
    os.write(output.fileno(), b"one\ntwo\n")
    assert output.read_last_lines() == "\n  | one\n  | two"
    output.close()
    assert output.read_last_lines() == "\n  | one\n  | two"


def test_last_lines_have_what_nobody_has_read_yet() -> None:
    async def scenario() -> str:
        output = ProcessOutput(limit=1000)
        theirs = os.dup(output.fileno())
        await output.listen()
        os.write(theirs, b"read\n")
        await asyncio.sleep(0.05)
        os.write(theirs, b"not read\n")
        found = output.read_last_lines()
        os.close(theirs)
        output.close()
        return found

    assert asyncio.run(scenario()) == "\n  | read\n  | not read"
