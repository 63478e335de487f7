"""Small runs, and what can be read of them from outside."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.ledger import Ledger
from headway.monitor.event_files import read_event_lines
from headway.monitor.event_log import LoggedEvent, read_events
from tests.runs.template import Forked, Template

SMALL: dict[str, Any] = {
    "exp_name": "small",
    "seed": 7,
    "async_generation_ratio": 1,
    "rollout_batch_size": 2,
    "num_return_sequences_in_group": 2,
    "prompt_length": 48,
    "response_length": 8,
    "max_steps": 4,
    "save_steps": 2,
    "eval_steps": 0,
    "filter_zero_variance": False,
    "processes": False,
    "track_with": "[]",
    "actor_train.model_args.disable_gradient_checkpointing": True,
    "actor_train.training_args.learning_rate": 1e-3,
    "actor_train.training_args.per_device_train_batch_size": 4,
    "actor_train.data_args.file_name": "addition",
    "rewards.arithmetic.reward_fn": "numeric",
    "rewards.arithmetic.tag_included": "addition",
}
GATE = """
import asyncio
from pathlib import Path

from headway.flow.stage import Stage, register_stage
from headway.types import SampleGroup

@register_stage("gate")
class Gate(Stage):
    consumes = produces = SampleGroup

    async def process(self, group):
        while self.pipeline.headway.trained >= {steps} and not Path({opened!r}).exists():
            await asyncio.sleep(0.005)
        return group
"""


def hold_after(steps: int, directory: Path) -> tuple[dict[str, str], Path]:
    """Options of a run that lets no group pass once it has made so many steps, and the file that lets them go on.

    Groups that have passed before are trained: a run that is ahead by one batch makes one step more. Whoever waits for
    the steps and then kills something finds the run at work, however slow the machine is.
    """
    plugin, opened = directory / "gate.py", directory / "opened"
    plugin.write_text(GATE.format(steps=steps, opened=str(opened)))
    return {"plugins": f"[{plugin}]", "stages": "[{name: gate, after: rollout}]"}, opened


def make_model(directory: str, alphabet: str | None = None) -> None:
    """A decoder with random weights: its answers are noise, of some forty characters where they may be."""
    from headway.models.tiny_model import ALPHABET, make_tiny_model

    make_tiny_model(Path(directory), steps=0, alphabet=alphabet or ALPHABET)


def make_reward_model(directory: str, head: str = "sequence") -> None:
    """A decoder with random weights and a head of one number, with the tokenizer of the policy."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaForTokenClassification

    from headway.models.tiny_model import make_character_tokenizer

    tokenizer, kinds = (
        make_character_tokenizer(),
        {
            "sequence": LlamaForSequenceClassification,
            "token": LlamaForTokenClassification,
        },
    )
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        num_labels=1,
    )
    kinds[head](config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def check_checkpoint(directory: str) -> None:
    """That `transformers` loads it, with nothing missing and nothing left over."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, said = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"], said
    AutoTokenizer.from_pretrained(directory)


class Runs:
    """Makes runs from one template, with one model."""

    def __init__(self, template: Template, model: Path) -> None:
        self.template, self.model = template, model

    def words(self, directory: Path, **changed: Any) -> list[str]:
        """The overrides of a small run in `directory`."""
        options = {**SMALL, "pretrain": str(self.model), "output_dir": str(directory)}
        options.update({key.replace("__", "."): value for key, value in changed.items()})
        return [f"{key}={_text(value)}" for key, value in options.items() if value is not None]

    def train(self, directory: Path, *more: str, largest_file: Any = 0, **changed: Any) -> Run:
        """`headway train` of a small run, begun."""
        words = ["train", *self.words(directory, **changed), *more]
        return self.start(directory, *words, largest_file=largest_file)

    def start(self, directory: Path, *words: str, largest_file: int = 0, cwd: Path | None = None) -> Run:
        """Any command, run in `cwd`; what it prints goes beside `directory`."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        output = directory.with_name(directory.name + ".out")
        output.unlink(missing_ok=True)
        forked = self.template.command(*words, output=output, largest_file=largest_file, cwd=cwd)
        return Run(forked, directory, output)


class Run:
    """A command at work."""

    def __init__(self, forked: Forked, directory: Path, output: Path) -> None:
        self.forked, self.directory, self._output = forked, directory, output

    @property
    def pid(self) -> int:
        return self.forked.pid

    @property
    def text(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def end(self) -> int:
        return self.forked.wait()

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    @property
    def alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def until(self, condition: Callable[[], Any], timeout_s: float = 120.0) -> bool:
        """Wait for something about the run; false if it ended before. To ask takes a third of the time at most."""
        deadline, begun = time.monotonic() + timeout_s, time.monotonic()
        while not condition():
            if not self.alive:
                return False
            assert time.monotonic() < deadline, self.text
            time.sleep(max(0.003, 2 * (time.monotonic() - begun)))
            begun = time.monotonic()
        return True


def events(directory: Path, *kinds: str) -> list[LoggedEvent]:
    """What the run has written down, whole lines only."""
    with suppress(FileNotFoundError):
        found = list(read_events(line for line in read_event_lines(directory) if line.endswith("\n")))
        return [event for event in found if not kinds or event.kind in kinds]
    return []


def count(directory: Path, kind: str) -> int:
    """Events of a kind so far, counted without reading them."""
    with suppress(FileNotFoundError, IsADirectoryError):  # it may be made at this moment
        return sum(f'"{kind}",' in line for line in read_event_lines(directory))
    return 0


def rows(directory: Path, query: str) -> list[tuple[Any, ...]]:
    """Of the ledger, read as anybody may; none before there is one."""
    if not (directory / "ledger.sqlite").exists():
        return []
    db = sqlite3.connect(directory / "ledger.sqlite")
    try:
        return db.execute(query).fetchall()
    except sqlite3.OperationalError:  # killed before its tables were made
        return []
    finally:
        db.close()


def parts(run: Run) -> dict[str, int]:
    return parts_in(run.directory)


def parts_in(directory: Path) -> dict[str, int]:
    """The processes of a run's trainer and engines, by name: who has its logs open and is not the run."""
    logs, found = str(directory / "logs"), {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            output = str((entry / "fd" / "1").readlink())
        except OSError:
            continue
        if output.startswith(logs):
            found[Path(output).stem] = int(entry.name)
    return found


def audit(directory: Path) -> None:
    ledger = Ledger(directory / "ledger.sqlite")
    try:
        assert ledger.audit() == []
    finally:
        ledger.close()


def gone(pids: list[int], within_s: float = 30.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def segments() -> set[str]:
    """Shared memory that has a name, without the directories of tests."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("pytest-")}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
