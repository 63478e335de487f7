"""FrozenLake in words: cross the ice to the goal without falling into a hole.

Maps are made from the seed and can always be crossed; walking and slipping are gymnasium's own. Options are those of
ROLL's environment of the same name, and three more: `view`, how the lake is told (`grid`: all of it; `near`: which way
the goal is, and where there is ice around); `progress`, a reward for coming nearer, without which a small model does
not begin to learn; and `anywhere`, start and goal on any two cells instead of opposite corners, so that no move is
right more often than another. What progress adds up to over an episode depends only on where it ends, so walking to and
fro earns nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from headway.environments.text_environment import Reply
from headway.errors import ConfigError

_MOVES = ("Left", "Down", "Right", "Up")
"""In gymnasium's order."""
_OFFSETS = ((0, -1), (1, 0), (0, 1), (-1, 0))
_CELL_LETTERS = {"P": "player", "_": "empty", "O": "hole", "G": "goal", "X": "player in hole", "√": "player on goal"}
_GRID_INSTRUCTIONS = (
    "You are walking on a frozen lake. Reach the goal without stepping into a hole.{slips}\n"
    "The map shows: {letters}.\nEach turn answer with one move: {moves}."
)
_NEAR_INSTRUCTIONS = "Answer with one word: {moves}.{slips}"
_SLIPPERY_NOTE = " The ice is slippery: you may slide sideways."


class FrozenLake:
    """`data` may hold `map`, rows of S, F, H and G."""

    reusable = True

    def __init__(
        self,
        *,
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = True,
        max_steps: int = 20,
        map_seed: int | None = None,
        view: str = "grid",
        progress: float = 0.0,
        anywhere: bool = False,
        action_lookup: Mapping[int, str] | Sequence[str] = _MOVES,
        action_pattern: str | None = None,
        grid_lookup: Mapping[int, str] | None = None,
        grid_vocab: Mapping[str, str] | None = None,
        env_instruction: str | None = None,
        render_mode: str = "text",
    ) -> None:
        if not isinstance(size, int) or not 2 <= size <= 32:
            raise ConfigError("must be from 2 to 32", key="size", value=size)
        if not 0 < p <= 1:
            raise ConfigError("must lie in (0, 1]: the share of ice", key="p", value=p)
        if view not in ("grid", "near"):
            raise ConfigError("is no view of the lake", key="view", value=view, hint="one of grid, near")
        if render_mode != "text":
            raise ConfigError("only text can be read", key="render_mode", value=render_mode, hint="text")
        self._size, self._p, self._slips, self._map_seed = size, p, is_slippery, map_seed
        self._near, self._progress, self._anywhere = view == "near", progress, anywhere
        self._moves = _parse_move_names(action_lookup)
        self._pattern = None if action_pattern is None else re.compile(action_pattern, re.DOTALL)
        self._word = re.compile(rf"\b({'|'.join(map(re.escape, self._moves))})\b", re.IGNORECASE)
        own = {int(place): letter for place, letter in (grid_lookup or {}).items()}  # in YAML and JSON keys are texts
        self._letters = [own.get(place, letter) for place, letter in enumerate(_CELL_LETTERS)]
        self.max_steps = max_steps
        self.instructions = env_instruction or self._told(grid_vocab or self._vocabulary())

    def _vocabulary(self) -> dict[str, str]:
        return dict(zip(self._letters, _CELL_LETTERS.values(), strict=True))

    def _told(self, vocabulary: Mapping[str, str]) -> str:
        letters = ", ".join(f"{letter} {meaning}" for letter, meaning in vocabulary.items())
        moves = ", ".join(self._moves[:-1]) + f" or {self._moves[-1]}"
        slips = _SLIPPERY_NOTE if self._slips else ""
        return (_NEAR_INSTRUCTIONS if self._near else _GRID_INSTRUCTIONS).format(
            slips=slips, letters=letters, moves=moves
        )

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

        drawn = data.get("map")
        if drawn is None:
            number = _seed32(seed, self._map_seed)
            drawn = generate_random_map(self._size, self._p, number)
            drawn = _move_start_and_goal(drawn, Random(number)) if self._anywhere else drawn
        self._lake: Any = FrozenLakeEnv(desc=drawn, is_slippery=self._slips)
        state, _ = self._lake.reset(seed=_seed32(seed, None))
        self._rows = [str(row) for row in drawn]
        self._at = divmod(int(state), len(self._rows[0]))
        self._distance = _distances_to_goal(self._rows)
        if self._at not in self._distance:
            raise ConfigError("the goal cannot be reached", key="map", value=drawn)
        self._far = self._distance[self._at]
        return self._shown()

    def step(self, action: str) -> Reply:
        move = self._move(action)
        if move is None:
            return Reply(f"Answer with one of {', '.join(self._moves)}.\n{self._shown()}", valid=False)
        before = self._at
        state, _, over, *_ = self._lake.step(move)
        self._at = divmod(int(state), len(self._rows[0]))
        won = self._rows[self._at[0]][self._at[1]] == "G"
        nearer = self._distance[before] - self._distance.get(self._at, self._distance[before])
        reward = float(won) + self._progress * nearer / self._far
        info = {"effective": self._at != before}
        return Reply(self._shown(), reward, done=bool(over), success=won if over else None, info=info)

    def _move(self, action: str) -> int | None:
        """The one move that is named; several different ones are none."""
        if self._pattern is not None:
            found = self._pattern.search(action)
            if found is None:
                return None
            action = found[1] if found.groups() else found[0]
        named = {word.lower() for word in self._word.findall(action)}
        return [word.lower() for word in self._moves].index(named.pop()) if len(named) == 1 else None

    def _shown(self) -> str:
        return self._surroundings() if self._near else self._grid()

    def _grid(self) -> str:
        player, ice, hole, goal, fallen, won = self._letters
        letters = {"S": ice, "F": ice, "H": hole, "G": goal}
        lines = [[letters[cell] for cell in row] for row in self._rows]
        row, column = self._at
        lines[row][column] = {"H": fallen, "G": won}.get(self._rows[row][column], player)
        return "\n".join("".join(line) for line in lines)

    def _surroundings(self) -> str:
        row, column = self._at
        goal_row, goal_column = next(cell for cell, left in self._distance.items() if left == 0)
        ways = ((self._moves[1], goal_row - row), (self._moves[2], goal_column - column))
        there = [word if count > 0 else self._opposite(word) for word, count in ways if count]
        around = zip(self._moves, _OFFSETS, strict=True)
        ice = [word for word, (down, right) in around if self._bears(row + down, column + right)]
        return f"The goal is {' and '.join(there) or 'here'}. You can go {' or '.join(ice)}. Which direction? One word."

    def _opposite(self, word: str) -> str:
        return self._moves[(self._moves.index(word) + 2) % 4]

    def _bears(self, row: int, column: int) -> bool:
        inside = 0 <= row < len(self._rows) and 0 <= column < len(self._rows[0])
        return inside and self._rows[row][column] != "H"


def _parse_move_names(given: Mapping[int, str] | Sequence[str]) -> tuple[str, ...]:
    """The four moves in gymnasium's order, from a list or from numbers to words, counted from 0 or from 1."""
    words = [given[number] for number in sorted(given, key=int)] if isinstance(given, Mapping) else list(given)
    if len(words) != 4 or len({str(word).lower() for word in words}) != 4:
        raise ConfigError("must be four different words", key="action_lookup", value=given, hint=", ".join(_MOVES))
    return tuple(map(str, words))


def _seed32(seed: int, fixed: int | None) -> int:
    return (seed if fixed is None else fixed) % 2**32


def _move_start_and_goal(rows: Sequence[str], random: Random) -> list[str]:
    """The same lake with start and goal on two cells between which there is a way."""
    start, goal = random.sample(sorted(_distances_to_goal(rows)), 2)
    letters = [list(row.replace("S", "F").replace("G", "F")) for row in rows]
    for (row, column), letter in ((start, "S"), (goal, "G")):
        letters[row][column] = letter
    return ["".join(row) for row in letters]


def _distances_to_goal(rows: Sequence[str]) -> dict[tuple[int, int], int]:
    """Moves to the goal from every cell that has a way to it."""
    goals = [(row, column) for row, line in enumerate(rows) for column, cell in enumerate(line) if cell == "G"]
    found, edge = dict.fromkeys(goals, 0), goals
    while edge:
        around = [(row + down, column + right) for row, column in edge for down, right in _OFFSETS]
        here = found[edge[0]] + 1
        edge = [
            (row, column)
            for row, column in dict.fromkeys(around)
            if 0 <= row < len(rows) and 0 <= column < len(rows[0]) and rows[row][column] != "H"
            if (row, column) not in found
        ]
        found |= dict.fromkeys(edge, here)
    return found
