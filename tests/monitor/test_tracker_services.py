"""Trackers against the real packages of their services, without a network; a package that is missing is skipped.

They run in processes of their own: these packages start threads and servers, and change settings of the whole process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import sys
from pathlib import Path
directory = Path({directory!r})
"""
WRITE = """
sys.path.insert(0, {root!r})
from tests.monitor.factory import resumed_run
from tests.monitor.test_trackers import track
events = resumed_run(first=12, back_to=10, then=8)
second = max(place for place, event in enumerate(events) if event.kind == "run.begin")
directory.mkdir(exist_ok=True)
track([{name!r}], directory, {part})
"""
"""A run that was killed at step 12 and went on from step 10, up to step 18."""
RECORDS = """
def records(file):  # a log of LevelDB, which both services write when they are offline
    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts = (parts if kind in (3, 4) else b"") + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield parts
"""
READ = {
    "wandb": f"""
import json
from wandb.proto.wandb_internal_pb2 import Record
{RECORDS}
for file in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
    for data in records(file):
        record = Record()
        record.ParseFromString(data)
        row = {{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}}
        if "reward/train" in row:
            print(row["trained"])
""",
    "trackio": """
from trackio.sqlite_storage import SQLiteStorage
(name,) = SQLiteStorage.get_runs("project")
for row in SQLiteStorage.get_logs("project", name):
    if "reward/train" in row:
        print(row["step"])
""",
    "mlflow": """
from mlflow import MlflowClient
client = MlflowClient(f"sqlite:///{directory / 'mlflow.db'}")
(run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
assert run.data.params == {"seed": "3"} and run.info.status == "FINISHED"
for row in client.get_metric_history(run.info.run_id, "reward/train"):
    print(row.step)
""",
    "swanlab": f"""
import re
{RECORDS}
for file in sorted(directory.glob("swanlab/run-*/*.swanlab")):
    for data in records(file):
        for step in re.findall(rb"reward/train\\x10(.)\\x18", data, re.DOTALL):
            print(step[0])
""",
}
STEPS = [*range(1, 13), *range(11, 19)]


@pytest.mark.parametrize("name", sorted(READ))
def test_the_service_reads_back_what_a_resumed_run_wrote(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name)
    for key, value in {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "TRACKIO_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(key, value)
    root, directory = str(Path(__file__).parents[2]), str(tmp_path / "run")
    begin = BEGIN.format(directory=directory)
    parts = [WRITE.format(root=root, name=name, part=part) for part in ("events[:second]", "events[second:]")]
    for work in (*parts, READ[name]):
        done = subprocess.run([sys.executable, "-c", begin + work], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert [int(line) for line in done.stdout.splitlines() if line.strip().isdigit()] == STEPS
