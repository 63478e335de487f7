"""Whole groups of every step, token by token: `groups.jsonl`, which the dashboard reads.

A line has step, group, task, prompt, expected and members. A member has its sample, reward and its parts, advantage,
lag, finish and turns. A turn has what the policy saw (`observation`), its tokens as texts, their log-probabilities, the
versions that made them as [version, count], and the reward of the environment.

The first groups of a step are written. Every 32 MB of the file, only every second of the steps so far is written from
then on, so the file of a long run stays small. A full disk stops this log, not the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headway.types import Batch, Sample, SampleGroup, Turn

GROUPS_FILE = "groups.jsonl"
_GROUPS_PER_STEP = 2
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

    def write_batch(self, batch: Batch, trained: int) -> None:
        """Write the first groups of a batch."""
        try:
            size = self._path.stat().st_size if self._path.exists() else 0
            if trained % (1 << min(20, size // _THINNING_BYTES)):
                return
            lines = [json.dumps(self._make_row(group, trained), ensure_ascii=False) for group in self._choose(batch)]
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
        task = group.task
        return {
            "step": trained,
            "group": group.group_id,
            "task": task.position,
            "domain": task.domain,
            "prompt": task.data.get(self._prompt, ""),
            "expected": task.data.get(self._answer) if self._answer else None,
            "members": [self._make_member(sample, trained) for sample in group.samples[:_MEMBERS_PER_GROUP]],
            "size": len(group.samples),
        }

    def _make_member(self, sample: Sample, trained: int) -> dict[str, Any]:
        score, episode = sample.score, sample.episode
        return {
            "sample": sample.sample_id,
            "reward": None if score is None else score.value,
            "parts": {} if score is None else dict(score.parts),
            "advantage": round(sample.advantage, 5),
            "lag": trained - 1 - sample.oldest,
            "length": sample.actions,
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
