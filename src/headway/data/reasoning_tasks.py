"""Rows of reasoning-gym: procedural tasks, generated when the source is made.

Guarantees: the same task, options and seed give the same rows in every process. Some generators walk over sets, whose
order changes from process to process, so all of them run in a process of their own with fixed hashes. A row carries
its entry's metadata, written as a Python literal because JSON would turn tuples into lists: with it the reward
`reasoning_gym` scores an answer without making the entry again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from headway.data.data_files import NumberedRows
from headway.errors import ConfigError
from headway.seeding import make_rng

REASONING_COLUMN = "reasoning_gym"
"""Holds `task`, `options` and `metadata` of a row; read by the reward of the same name."""


def generate_reasoning_rows(
    task: str, options: Mapping[str, Any], *, columns: tuple[str, str], seed: int, held_out: bool, key: str
) -> NumberedRows:
    """`size` (500) entries of `task`. Held-out rows have a seed of their own."""
    if held_out:
        seed = make_rng(seed, "data", "reasoning_gym", "held out").randrange(0, 2**31)
    question = {"task": task, "options": {"size": 500, "seed": seed, **options}}
    name = f"reasoning_gym:{task}"
    for number, line in enumerate(_child(json.dumps(question), name, key), start=1):
        entry = json.loads(line)
        if "problem" in entry:
            raise ConfigError(entry["problem"], key=key, value=name)
        yield (
            number,
            {
                columns[0]: entry["question"],
                columns[1]: entry["answer"],
                "domain": REASONING_COLUMN,
                "tag": task,
                REASONING_COLUMN: {**question, "metadata": entry["metadata"]},
            },
        )


def _child(question: str, name: str, key: str) -> Iterator[str]:
    path = [entry for entry in sys.path if entry]
    code = (
        f"import sys; sys.path[:] = {path!r}; from headway.data.reasoning_tasks import generate; generate(sys.argv[1])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", code, question]
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, env=environment) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                yield line.decode()
        except BaseException:
            child.kill()
            raise
        if child.wait():
            said.seek(0)
            last = (said.read().decode(errors="replace").strip().splitlines() or ["its process died"])[-1]
            raise ConfigError(f"cannot be generated: {last}", key=key, value=name)


def write_entries(question: str) -> None:
    """What the child does: one entry a line, or one line that says what is wrong."""
    asked = json.loads(question)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no entry
    with answers:
        try:
            dataset = _dataset(asked["task"], asked["options"])
        except ConfigError as error:
            print(json.dumps({"problem": str(error)}), file=answers)
            return
        for index in range(len(dataset)):
            entry = dataset[index]
            found = {
                "question": entry["question"],
                "answer": entry["answer"],
                "metadata": make_literal(entry["metadata"]),
            }
            print(json.dumps(found), file=answers)


def make_literal(value: Any) -> str:
    """A value as Python text that `ast.literal_eval` reads back; numpy's numbers and texts become plain ones."""
    return repr(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(name): _plain(inner) for name, inner in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_plain(inner) for inner in value)
    if isinstance(value, str):
        return str(value)
    return value.item() if hasattr(value, "item") else value


def _dataset(task: str, options: Mapping[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError("needs reasoning-gym", hint="pip install 'headway[data]'") from error
    if task not in DATASETS:
        close = get_close_matches(task, DATASETS, 1)
        meant = f", did you mean 'reasoning_gym:{close[0]}'?" if close else ""
        raise ConfigError(f"reasoning-gym has no task {task!r}{meant}")
    known = DATASETS[task][1].__dataclass_fields__
    for option in options:
        if option not in known:
            raise ConfigError(f"has no option {option!r}; it has: {', '.join(sorted(known))}")
    try:
        return reasoning_gym.create_dataset(task, **options)
    except Exception as error:
        raise ConfigError(f"refuses its options: {error or type(error).__name__}") from error
