"""Files and command lines that other projects ship are accepted, or refused in a few lines that name the feature."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.config import load_config
from headway.errors import HeadwayError

PEERS = Path(__file__).parents[2].parent / "shared" / "peers"
ACCEPTED = {"roll": 38, "verl": 63, "dots.rl": 49, "gerl": 4}
"""How many of each system are accepted at least."""

pytestmark = pytest.mark.skipif(not PEERS.is_dir(), reason="the files of other projects are not here")


def list_items(system: str) -> Iterator[tuple[str, str | None, list[str]]]:
    if system == "roll":
        for file in sorted((PEERS / "roll").rglob("*.yaml")):
            if file.parent.name != "config":
                yield file.name, str(file), []
        return
    for line in (PEERS / f"{system}.jsonl").read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        yield item["script"], None, item["argv"]


@pytest.mark.parametrize("system", ACCEPTED)
def test_what_another_project_ships_is_accepted_or_refused_in_three_lines(
    system: str, capsys: pytest.CaptureFixture[str]
) -> None:
    accepted, refused, wordy, slowest = 0, 0, [], 0.0
    for name, source, words in list_items(system):
        start = time.process_time()
        try:
            load_config(source, words)
            accepted += 1
        except HeadwayError as error:
            refused += 1
            if len(str(error).splitlines()) > 3:
                wordy.append(name)
        slowest = max(slowest, time.process_time() - start)
    with capsys.disabled():
        print(f"\n{system:8} accepted {accepted:3}  refused {refused:3}  slowest {slowest:.2f} s")
    assert not wordy
    assert accepted >= ACCEPTED[system]
    assert slowest < 2
