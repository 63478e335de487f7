"""Sokoban in words: push every box onto a target.

Rooms are made from the seed and can be solved within `max_steps` and within `search_depth` moves. Rewards are those
of ROLL and RAGEN: a price for each move, a reward for each box that comes onto or off a target, and one for the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.environments.library.sokoban_rooms import MOVES, Room, make_room, moved
from headway.environments.library.wording import choice_in
from headway.environments.text import Reply
from headway.errors import ConfigError

_INSTRUCTIONS = """You are solving a Sokoban puzzle. Push every box onto a target.
The room is shown as text: # wall, _ floor, O target, X box, √ box on a target, P you, S you on a target.
You push a box by walking into it; you cannot pull one, nor push two at once.
Each turn answer with one move: <answer>Up</answer>, <answer>Down</answer>, <answer>Left</answer> or \
<answer>Right</answer>."""


class Sokoban:
    """`data` may hold `room`, a drawing of one's own in the same letters."""

    instructions = _INSTRUCTIONS
    reusable = True

    def __init__(
        self,
        *,
        dim_room: Sequence[int] = (6, 6),
        num_boxes: int = 1,
        max_steps: int = 20,
        search_depth: int = 30,
        step_penalty: float = 0.1,
        box_reward: float = 1.0,
        finish_reward: float = 10.0,
    ) -> None:
        if len(dim_room) != 2 or not all(isinstance(size, int) and 4 <= size <= 32 for size in dim_room):
            raise ConfigError("must be two sizes from 4 to 32", key="dim_room", value=dim_room)
        if not 1 <= num_boxes <= (dim_room[0] - 2) * (dim_room[1] - 2) // 3:
            raise ConfigError("does not fit into the room", key="num_boxes", value=num_boxes, hint="at least 1")
        for key, value in {"max_steps": max_steps, "search_depth": search_depth}.items():
            if value < 1:
                raise ConfigError("must be at least 1", key=key, value=value)
        self.max_steps = max_steps
        self._sizes = {"rows": dim_room[0], "columns": dim_room[1], "boxes": num_boxes}
        self._depth = min(search_depth, max_steps)
        make_room(0, depth=self._depth, **self._sizes)  # says where there is no such room
        self._step_penalty, self._box_reward, self._finish_reward = step_penalty, box_reward, finish_reward

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        self.solution: tuple[str, ...] = ()
        if "room" in data:
            self.room = read_room(str(data["room"]))
        else:
            self.room, self.solution = make_room(seed, depth=self._depth, **self._sizes)
        return drawn(self.room)

    def step(self, action: str) -> Reply:
        move = choice_in(action, list(MOVES))
        if move is None:
            text = f"That is not a move. Answer with one of {', '.join(MOVES)}.\n{drawn(self.room)}"
            return Reply(text, -self._step_penalty, valid=False)
        before, self.room = self.room, moved(self.room, move)
        reward = self._box_reward * (self.room.placed - before.placed) - self._step_penalty
        if self.room.solved:
            return Reply(drawn(self.room), reward + self._finish_reward, done=True, success=True)
        text = drawn(self.room) if self.room is not before else f"You cannot move there.\n{drawn(self.room)}"
        return Reply(text, reward, info={"effective": self.room is not before})


def drawn(room: Room) -> str:
    """The room in letters, a line for each row."""

    def letter(cell: tuple[int, int]) -> str:
        if cell not in room.floor:
            return "#"
        on = cell in room.targets
        if cell == room.player:
            return "S" if on else "P"
        if cell in room.boxes:
            return "√" if on else "X"
        return "O" if on else "_"

    return "\n".join("".join(letter((row, column)) for column in range(room.columns)) for row in range(room.rows))


def read_room(drawing: str) -> Room:
    """A room from its letters. Raises `ConfigError`."""
    lines = drawing.strip().splitlines()
    letters = {(row, column): letter for row, line in enumerate(lines) for column, letter in enumerate(line.strip())}
    players = [cell for cell, letter in letters.items() if letter in "PS"]
    room = Room(
        rows=len(lines),
        columns=max(map(len, lines), default=0),
        floor=frozenset(cell for cell, letter in letters.items() if letter != "#"),
        targets=frozenset(cell for cell, letter in letters.items() if letter in "O√S"),
        boxes=frozenset(cell for cell, letter in letters.items() if letter in "X√"),
        player=players[0] if players else (0, 0),
    )
    if (
        len(players) != 1
        or not room.boxes
        or len(room.boxes) != len(room.targets)
        or set("".join(lines)) - set("#_OX√PS")
    ):
        problem = "needs one player, as many boxes as targets, and no other letters than #_OX√PS"
        raise ConfigError(problem, key="room", value=drawing)
    return room
