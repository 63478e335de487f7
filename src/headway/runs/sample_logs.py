"""A few samples of a run on disk, so that people can watch the policy change: `samples.jsonl` and `images.jsonl`.

Each line of `samples.jsonl` has step, kind and the fields of `make_sample_row`, which `headway eval --out` writes, too.
The kind says how the answer was chosen:

    held_out      first answer to a held-out task, always of the same tasks: early and late can be compared
    first         first member of a group that was trained on
    best, worst   members of that group with the highest and lowest reward

`images.jsonl` has the first images of every validation: always the same prompts and the same noise. A full disk stops
these logs, not the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headway.environments.text_episode import SEED_KEY
from headway.monitor.sample_excerpts import ImageLog
from headway.rewards.images.image_reward import downscale_image, image_to_png_base64
from headway.rollout.environment_agent import Decode
from headway.rollout.sample_evaluation import EvaluatedSample
from headway.types import Batch, Episode, Image, SampleGroup, Score, Turn

_GROUPS_PER_STEP = 2
_ANSWERS_PER_VALIDATION = 8
_IMAGES_PER_VALIDATION = 24
_LONGEST_SIDE = 256
"""Longest side of a logged image in pixels."""
_MOST_CHARACTERS = 4000
"""Longest text of an observation: an agent may see the same long page again in every turn."""


def make_sample_row(
    episode: Episode, score: Score | None, *, prompt: str = "prompt", answer: str | None = "answer", decode: Decode
) -> dict[str, Any]:
    """Return one answer as JSON values: `prompt`, `answer`, `expected`, `reward`, its weighted parts as `rewards`, and
    `finish`. An episode also has `turns`, each with the texts of `observation` and `answer` and its `reward`, and the
    facts of its environment as `info`.

    `prompt` and `answer` are the columns of the data that hold the prompt and the expected answer.
    """
    task, texts = episode.task, [turn.generation.text for turn in episode.turns]
    start = f"{task.domain}, seed {task.data[SEED_KEY]}" if SEED_KEY in task.data else ""
    row = {
        "prompt": task.data.get(prompt, start),
        "answer": texts[0] if len(texts) == 1 else " → ".join(text.strip() for text in texts),
        "expected": task.data.get(answer) if answer else None,
        "reward": None if score is None else score.value,
        "rewards": {} if score is None else dict(score.parts),
        "finish": str(episode.turns[-1].generation.finish),
    }
    if len(texts) > 1 or SEED_KEY in task.data:
        row["turns"] = [_make_turn_row(turn, decode) for turn in episode.turns]
    return {**row, "info": dict(episode.info)} if episode.info else row


def _make_turn_row(turn: Turn, decode: Decode) -> dict[str, Any]:
    seen, half = decode(turn.observation), _MOST_CHARACTERS // 2
    seen = seen if len(seen) <= _MOST_CHARACTERS else f"{seen[:half]}\n […]\n{seen[-half:]}"
    return {"observation": seen, "answer": turn.generation.text, "reward": turn.reward}


class SampleLog:
    """Writes a few answers of every step and of every validation. Images are written of validations only."""

    def __init__(
        self, directory: Path, *, prompt: str = "prompt", answer: str | None = "answer", decode: Decode | None = None
    ) -> None:
        self._path, self._prompt, self._answer = directory / "samples.jsonl", prompt, answer
        self._decode = decode or str
        self._images = ImageLog(directory / "images.jsonl", prompts=_IMAGES_PER_VALIDATION)

    def write_batch(self, batch: Batch, trained: int) -> None:
        """Write members of the first groups of a batch."""
        rows = [
            self._make_row(episode, score, trained, kind)
            for group in batch.groups[:_GROUPS_PER_STEP]
            for kind, episode, score in _choose_members(group)
            if episode.turns[-1].generation.image is None
        ]
        self._append(rows)

    def write_validation(self, trained: int, judged: Sequence[EvaluatedSample]) -> None:
        """Write the first answer to each of the first tasks."""
        first = [(one, *min(one.answers, key=_get_member_number)) for one in judged if one.answers]
        drawn = [
            (str(one.task.data.get(self._prompt, "")), _encode_image(image), score.value)
            for one, episode, score in first[:_IMAGES_PER_VALIDATION]
            if (image := episode.turns[-1].generation.image) is not None
        ]
        if drawn:
            self._images(trained, drawn)
        else:
            shown = first[:_ANSWERS_PER_VALIDATION]
            self._append(self._make_row(episode, score, trained, "held_out") for _, episode, score in shown)

    def _append(self, rows: Iterable[dict[str, Any]]) -> None:
        lines = [f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows]
        if not lines:
            return
        try:
            with self._path.open("a", encoding="utf-8") as log:
                log.write("".join(lines))
        except OSError:
            return  # the ledger and the event log report the problem of the disk

    def _make_row(self, episode: Episode, score: Score | None, trained: int, kind: str) -> dict[str, Any]:
        row = make_sample_row(episode, score, prompt=self._prompt, answer=self._answer, decode=self._decode)
        return {"step": trained, "kind": kind, **row}


def _choose_members(group: SampleGroup) -> list[tuple[str, Episode, Score | None]]:
    """Return the first member, the best and the worst, each with its kind."""
    members = [(sample.episode, sample.score) for sample in group.samples]
    ranked = sorted(members, key=lambda member: -(member[1].value if member[1] else 0.0))
    chosen = [("first", min(members, key=_get_member_number)), ("best", ranked[0]), ("worst", ranked[-1])]
    return [(kind, *member) for kind, member in chosen[: 3 if len(members) > 1 else 1]]


def _get_member_number(member: tuple[Episode, Score | None]) -> int:
    """Return the number in the name of a sample: members finish in any order, short answers first."""
    return int(member[0].sample_id.rpartition(".")[2])


def _encode_image(image: Image) -> str:
    return image_to_png_base64(downscale_image(image, _LONGEST_SIDE))
