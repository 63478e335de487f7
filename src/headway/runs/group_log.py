"""Whole groups of every step, token by token: `groups.jsonl`, which the dashboard reads.

A line has step, group, task, prompt, expected and members. A member has its sample, reward and its parts, advantage,
lag, finish and turns. A turn has what the policy saw (`observation`), its tokens as texts, their log-probabilities, the
versions that made them as [version, count], and the reward of the environment. A group that was dropped has the reason
(`dropped`), the step that was under way, and those members that were finished.

The first groups of a step are written, and the first that were dropped for each reason. Every 32 MB of the file, only
every second of the steps so far is written from then on, so the file of a long run stays small. A full disk stops this
log, not the run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.types import Batch, DropReason, Episode, EpisodeGroup, SampleGroup, Score, Task, Turn

GROUPS_FILE = "groups.jsonl"
_GROUPS_PER_STEP = 2
"""Groups of a step that are written: so many trained ones, and so many dropped ones of each reason."""
_MEMBERS_PER_GROUP = 16
_TOKENS_PER_TURN = 2048
_THINNING_BYTES = 32 << 20


class GroupLog:
    """Writes whole groups of a step. `decode` turns token ids into text."""

    def __init__(
        self,
        directory: Path,
        decode: Callable[[Sequence[int]], str],
        *,
        prompt: str = "prompt",
        answer: str | None = "answer",
    ) -> None:
        self._path, self._decode, self._prompt, self._answer = directory / GROUPS_FILE, decode, prompt, answer
        self._pieces: dict[int, str] = {}
        """Texts of the tokens seen so far."""
        self._dropped: Counter[tuple[int, DropReason]] = Counter()
        """Dropped groups that were written, by step and reason."""

    def write_batch(self, batch: Batch, trained: int) -> None:
        """Write the first groups of a batch."""
        self._dropped.clear()
        if self._is_wanted(trained):
            self._write([self._make_row(group, trained) for group in self._choose(batch)])

    def write_dropped(self, group: EpisodeGroup, scores: Mapping[str, Score], reason: DropReason, step: int) -> None:
        """Write what was finished of a dropped group, or of one of its members."""
        self._dropped[step, reason] += 1
        if self._dropped[step, reason] > _GROUPS_PER_STEP or not self._is_wanted(step):
            return
        texts = [episode for episode in group.episodes if episode.turns and episode.turns[-1].generation.image is None]
        members = [
            self._make_member(episode, scores.get(episode.sample_id), step) for episode in texts[:_MEMBERS_PER_GROUP]
        ]
        if members:
            head = self._make_head(group.group_id, group.task, step)
            self._write([{**head, "dropped": str(reason), "members": members, "size": len(texts)}])

    def _is_wanted(self, step: int) -> bool:
        try:
            size = self._path.stat().st_size if self._path.exists() else 0
        except OSError:
            return False
        return step % (1 << min(20, size // _THINNING_BYTES)) == 0

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        try:
            if lines:
                with self._path.open("a", encoding="utf-8", errors="replace") as log:
                    log.write("".join(f"{line}\n" for line in lines))
        except OSError:
            return  # the ledger and the event log report the problem of the disk

    def _choose(self, batch: Batch) -> list[SampleGroup]:
        """Return the first groups whose answers are texts."""
        texts = [group for group in batch.groups if group.samples[0].episode.turns[-1].generation.image is None]
        return texts[:_GROUPS_PER_STEP]

    def _make_row(self, group: SampleGroup, trained: int) -> dict[str, Any]:
        members = [
            {
                **self._make_member(sample.episode, sample.score, trained),
                "advantage": round(sample.advantage, 5),
            }
            for sample in group.samples[:_MEMBERS_PER_GROUP]
        ]
        return {
            **self._make_head(group.group_id, group.task, trained),
            "members": members,
            "size": len(group.samples),
        }

    def _make_head(self, group_id: int, task: Task, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "group": group_id,
            "task": task.position,
            "domain": task.domain,
            "prompt": task.data.get(self._prompt, ""),
            "expected": task.data.get(self._answer) if self._answer else None,
        }

    def _make_member(self, episode: Episode, score: Score | None, step: int) -> dict[str, Any]:
        runs = episode.runs
        return {
            "sample": episode.sample_id,
            "reward": None if score is None else score.value,
            "parts": {} if score is None else dict(score.parts),
            "lag": step - 1 - min((run.version for run in runs), default=step - 1),
            "length": sum(run.count for run in runs),
            "finish": str(episode.turns[-1].generation.finish),
            "turns": [self._make_turn(turn) for turn in episode.turns],
        }

    def _make_turn(self, turn: Turn) -> dict[str, Any]:
        made, shown = turn.generation, slice(_TOKENS_PER_TURN)
        row = {
            "observation": self._decode(list(turn.observation[shown])) if len(turn.observation) else "",
            "tokens": [self._find_piece(token) for token in made.actions[shown]],
            "logps": [round(float(value), 3) for value in made.logps[shown]],
            "versions": [[run.version, run.count] for run in made.runs],
            "left_out": max(0, len(made.actions) - _TOKENS_PER_TURN),
        }
        return row | ({"reward": turn.reward} if turn.reward else {})

    def _find_piece(self, token: Any) -> str:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._decode([token])
        return piece
