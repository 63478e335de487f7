"""FrozenLake as text: cross the ice to the goal without falling into a hole.

Maps are generated from the seed and can always be crossed; walking and slipping are gymnasium's own. The options are
those of ROLL's environment of the same name, and three more:

view        how the lake is shown (`grid`: all of it; `near`: the direction of the goal, and where there is ice around)
progress    a reward for coming nearer, without which a small model does not begin to learn; its sum over an episode
            depends only on where the episode ends, so walking to and fro earns nothing
anywhere    start and goal on any two cells instead of opposite corners, so that no move is right more often
"""

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from headway.environments.response_parsing import compile_action_pattern, find_pattern, order_words
from headway.environments.text_environment import Reply
from headway.errors import ConfigError

_MOVES = ("Left", "Down", "Right", "Up")
"""Names of the moves in gymnasium's order."""
_OFFSETS = ((0, -1), (1, 0), (0, 1), (-1, 0))
_CELL_LETTERS = {"P": "player", "_": "empty", "O": "hole", "G": "goal", "X": "player in hole", "√": "player on goal"}
_GRID_INSTRUCTIONS = (
    "You are walking on a frozen lake. Reach the goal without stepping into a hole.{slips}\n"
    "The map shows: {letters}.\nEach turn answer with one move: {moves}."
)
_NEAR_INSTRUCTIONS = "Answer with one word: {moves}.{slips}"
_SLIPPERY_NOTE = " The ice is slippery: you may slide sideways."


class FrozenLake:
    """Plays one lake per episode; `data` may hold `map`, rows of S, F, H and G."""

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
        special_token_list: Sequence[str] = (),
    ) -> None:
        if not isinstance(size, int) or not 2 <= size <= 32:
            raise ConfigError("must be from 2 to 32", key="size", value=size)
        if not 0 < p <= 1:
            raise ConfigError("must lie in (0, 1]: the share of ice", key="p", value=p)
        if view not in ("grid", "near"):
            raise ConfigError("is no view of the lake", key="view", value=view, hint="one of grid, near")
        if render_mode != "text":
            raise ConfigError("only text can be read", key="render_mode", value=render_mode, hint="text")
        self._size, self._p, self._is_slippery, self._map_seed = size, p, is_slippery, map_seed
        self._is_near_view, self._progress, self._anywhere = view == "near", progress, anywhere
        self._moves = order_words(action_lookup, _MOVES, "action_lookup")
        self._action_pattern = compile_action_pattern(action_pattern)
        self._special_tokens = tuple(special_token_list)
        self._move_pattern = re.compile(rf"\b({'|'.join(map(re.escape, self._moves))})\b", re.IGNORECASE)
        lookup = {int(index): letter for index, letter in (grid_lookup or {}).items()}  # JSON keys are texts
        self._letters = [lookup.get(index, letter) for index, letter in enumerate(_CELL_LETTERS)]
        self._show = self._show_surroundings if self._is_near_view else self._show_grid
        self.max_steps = max_steps
        self.instructions = env_instruction or self._make_instructions(grid_vocab)

    def _make_instructions(self, vocabulary: Mapping[str, str] | None) -> str:
        vocabulary = vocabulary or dict(zip(self._letters, _CELL_LETTERS.values(), strict=True))
        letters = ", ".join(f"{letter} {meaning}" for letter, meaning in vocabulary.items())
        moves = ", ".join(self._moves[:-1]) + f" or {self._moves[-1]}"
        template = _NEAR_INSTRUCTIONS if self._is_near_view else _GRID_INSTRUCTIONS
        return template.format(slips=_SLIPPERY_NOTE if self._is_slippery else "", letters=letters, moves=moves)

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

        rows = data.get("map")
        if rows is None:
            map_seed = (seed if self._map_seed is None else self._map_seed) % 2**32
            rows = generate_random_map(self._size, self._p, map_seed)
            rows = _move_start_and_goal(rows, Random(map_seed)) if self._anywhere else rows
        self._lake: Any = FrozenLakeEnv(desc=rows, is_slippery=self._is_slippery)
        state, _ = self._lake.reset(seed=seed % 2**32)
        self._rows = [str(row) for row in rows]
        self._position = divmod(int(state), len(self._rows[0]))
        self._distance = _distances_to_goal(self._rows)
        if self._position not in self._distance:
            raise ConfigError("the goal cannot be reached", key="map", value=rows)
        self._start_distance = self._distance[self._position]
        return self._show()

    def step(self, action: str) -> Reply:
        move = self._parse_move(action)
        if move is None:
            return Reply(f"Answer with one of {', '.join(self._moves)}.\n{self._show()}", valid=False)
        before = self._position
        state, _, done, *_ = self._lake.step(move)
        self._position = divmod(int(state), len(self._rows[0]))
        success = self._rows[self._position[0]][self._position[1]] == "G"
        nearer = self._distance[before] - self._distance.get(self._position, self._distance[before])
        reward = float(success) + self._progress * nearer / self._start_distance
        info = {"effective": self._position != before}
        return Reply(self._show(), reward, done=bool(done), success=success if done else None, info=info)

    def _parse_move(self, action: str) -> int | None:
        """Return the number of the move that is named; `None` if none or several different ones are."""
        if self._action_pattern is not None:
            action = find_pattern(action, self._action_pattern) or ""
        for token in self._special_tokens:
            action = action.replace(token, "")
        named = {word.lower() for word in self._move_pattern.findall(action)}
        return [word.lower() for word in self._moves].index(named.pop()) if len(named) == 1 else None

    def _show_grid(self) -> str:
        player, ice, hole, goal, fallen, won = self._letters
        letters = {"S": ice, "F": ice, "H": hole, "G": goal}
        lines = [[letters[cell] for cell in row] for row in self._rows]
        row, column = self._position
        lines[row][column] = {"H": fallen, "G": won}.get(self._rows[row][column], player)
        return "\n".join("".join(line) for line in lines)

    def _show_surroundings(self) -> str:
        row, column = self._position
        goal_row, goal_column = next(cell for cell, left in self._distance.items() if left == 0)
        left, down, right, up = self._moves
        ways = ((down, up, goal_row - row), (right, left, goal_column - column))
        towards = [forwards if count > 0 else backwards for forwards, backwards, count in ways if count]
        cells = {move: (row + down, column + right) for move, (down, right) in zip(self._moves, _OFFSETS, strict=True)}
        ice = [move for move, cell in cells.items() if _is_ice(self._rows, cell)]
        goal = " and ".join(towards) or "here"
        return f"The goal is {goal}. You can go {' or '.join(ice)}. Which direction? One word."


def _move_start_and_goal(rows: Sequence[str], random: Random) -> list[str]:
    """Return the same lake with start and goal on two random cells that are connected."""
    start, goal = random.sample(sorted(_distances_to_goal(rows)), 2)
    letters = [list(row.replace("S", "F").replace("G", "F")) for row in rows]
    for (row, column), letter in ((start, "S"), (goal, "G")):
        letters[row][column] = letter
    return ["".join(row) for row in letters]


def _is_ice(rows: Sequence[str], cell: tuple[int, int]) -> bool:
    """Return whether a cell is inside the lake and no hole."""
    row, column = cell
    return 0 <= row < len(rows) and 0 <= column < len(rows[0]) and rows[row][column] != "H"


def _distances_to_goal(rows: Sequence[str]) -> dict[tuple[int, int], int]:
    """Return the number of moves to the goal from every cell that is connected to it."""
    goals = [(row, column) for row, line in enumerate(rows) for column, cell in enumerate(line) if cell == "G"]
    found, edge = dict.fromkeys(goals, 0), goals
    while edge:
        around = [(row + down, column + right) for row, column in edge for down, right in _OFFSETS]
        distance = found[edge[0]] + 1
        edge = [cell for cell in dict.fromkeys(around) if _is_ice(rows, cell) and cell not in found]
        found |= dict.fromkeys(edge, distance)
    return found
