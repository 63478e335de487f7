"""Rows of reasoning-gym: procedural tasks, generated when the source is made.

Guarantees: the same task, options and seed give the same rows in every process. Some generators iterate over sets,
whose order changes from process to process, so all of them run in a child process with fixed hashes. A row carries the
metadata of its entry, with which the reward `reasoning_gym` scores an answer without generating the entry again. The
metadata is a Python literal, because JSON would turn tuples into lists.
"""

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
from headway.extras import import_optional
from headway.seeding import make_rng

REASONING_COLUMN = "reasoning_gym"
"""Column with `task`, `options` and `metadata` of a row; read by the reward of the same name."""


def generate_reasoning_rows(
    task: str, options: Mapping[str, Any], *, columns: tuple[str, str], seed: int, held_out: bool, key: str
) -> NumberedRows:
    """Yield `size` (500) entries of `task`. Held-out rows have a seed of their own."""
    if held_out:
        seed = make_rng(seed, "data", "reasoning_gym", "held out").randrange(0, 2**31)
    question = {"task": task, "options": {"size": 500, "seed": seed, **options}}
    name = f"reasoning_gym:{task}"
    for number, line in enumerate(_run_child(json.dumps(question), name, key), start=1):
        entry = json.loads(line)
        if "problem" in entry:
            raise ConfigError(entry["problem"], key=key, value=name)
        row = {columns[0]: entry["question"], columns[1]: entry["answer"], "domain": REASONING_COLUMN, "tag": task}
        yield number, {**row, REASONING_COLUMN: {**question, "metadata": entry["metadata"]}}


def _run_child(question: str, name: str, key: str) -> Iterator[str]:
    """Run `write_entries` in a child process and yield its lines."""
    path = [entry for entry in sys.path if entry]
    module = "headway.data.reasoning_tasks"
    code = f"import sys; sys.path[:] = {path!r}; from {module} import write_entries; write_entries(sys.argv[1])"
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", code, question]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                yield line.decode()
        except BaseException:
            child.kill()
            raise
        if child.wait():
            errors.seek(0)
            last = (errors.read().decode(errors="replace").strip().splitlines() or ["its process died"])[-1]
            raise ConfigError(f"cannot be generated: {last}", key=key, value=name)


def write_entries(question: str) -> None:
    """Print one entry per line, or one line with the problem. Runs in the child process."""
    asked = json.loads(question)
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # keeps what the library prints out of the entries
    with output:
        try:
            dataset = _make_dataset(asked["task"], asked["options"])
        except ConfigError as error:
            print(json.dumps({"problem": str(error)}), file=output)
            return
        for index in range(len(dataset)):
            entry = dataset[index]
            metadata = make_literal(entry["metadata"])
            print(
                json.dumps({"question": entry["question"], "answer": entry["answer"], "metadata": metadata}),
                file=output,
            )


def make_literal(value: Any) -> str:
    """Return Python text that `ast.literal_eval` reads back; numpy numbers and texts become plain ones."""
    return repr(_to_plain(value))


def _to_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_to_plain(name): _to_plain(inner) for name, inner in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_to_plain(inner) for inner in value)
    if isinstance(value, str):
        return str(value)
    return value.item() if hasattr(value, "item") else value


def _make_dataset(task: str, options: Mapping[str, Any]) -> Any:
    reasoning_gym = import_optional("reasoning_gym", extra="data", key="", value=task, problem="needs reasoning-gym")
    tasks = reasoning_gym.factory.DATASETS
    if task not in tasks:
        close = get_close_matches(task, tasks, 1)
        meant = f", did you mean 'reasoning_gym:{close[0]}'?" if close else ""
        raise ConfigError(f"reasoning-gym has no task {task!r}{meant}")
    known = tasks[task][1].__dataclass_fields__
    for option in options:
        if option not in known:
            raise ConfigError(f"has no option {option!r}; it has: {', '.join(sorted(known))}")
    try:
        return reasoning_gym.create_dataset(task, **options)
    except Exception as error:
        raise ConfigError(f"refuses its options: {error or type(error).__name__}") from error
