"""Sokoban as text: push every box onto a target. Rooms are generated from the seed.

Rewards are those of ROLL and RAGEN: a penalty for each move, a reward for each box that comes onto a target (lost again
when it leaves it), and one for the end.

Guarantees: the same seed and sizes give the same room; every room has a known solution within `max_steps` and
`search_depth` moves. At the start no box stands on a target; in rooms that are crowded for their depth, as few as were
found, and never all. Rooms are made by playing backwards; a solution is not proven to be the shortest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.environments.response_parsing import (
    compile_action_pattern,
    extract_choice,
    find_pattern,
    order_words,
)
from headway.environments.text_environment import Reply
from headway.errors import ConfigError
from headway.seeding import Rng, choose_item, make_rng, shuffle_items

Cell = tuple[int, int]
"""Row and column."""
MOVES: dict[str, Cell] = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
_SEARCH_EFFORT = 2000
"""Number of attempts to find a room without boxes on targets, times its cells and boxes."""
_BEAM_WIDTH = 120
"""Positions kept at each depth of the backward search; small rooms have fewer and are searched completely."""
_LETTERS = "#_O√XPS"
"""Wall, floor, target, box on a target, box, player, player on a target: the numbers 0 to 6 of `grid_lookup`."""
_MEANINGS = ("wall", "floor", "target", "box on a target", "box", "you", "you on a target")
_INSTRUCTIONS = """You are solving a Sokoban puzzle. Push every box onto a target.
The room is shown as text: {letters}.
You push a box by walking into it; you cannot pull one, nor push two at once.
Each turn answer with one move: {moves}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SokobanRoom:
    """A room. Walls and targets stay; the player and the boxes move."""

    rows: int
    columns: int
    floor: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def boxes_on_targets(self) -> int:
        return len(self.boxes & self.targets)

    @property
    def is_solved(self) -> bool:
        return self.boxes == self.targets


class Sokoban:
    """Plays one room per episode; `data` may hold `room`, a drawing of a room in the usual letters."""

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
        action_pattern: str | None = None,
        action_lookup: Mapping[int, str] | Sequence[str] = tuple(MOVES),
        grid_lookup: Mapping[int, str] | None = None,
        grid_vocab: Mapping[str, str] | None = None,
        env_instruction: str | None = None,
        render_mode: str = "text",
    ) -> None:
        if render_mode != "text":
            raise ConfigError("only text can be read", key="render_mode", value=render_mode, hint="text")
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
        make_room(0, depth=self._depth, **self._sizes)  # raises ConfigError if there is no such room
        self._step_penalty, self._box_reward, self._finish_reward = step_penalty, box_reward, finish_reward
        self._pattern = compile_action_pattern(action_pattern)
        self._moves = dict(zip(order_words(action_lookup, tuple(MOVES), "action_lookup"), MOVES, strict=True))
        lookup = {int(number): letter for number, letter in (grid_lookup or {}).items()}  # JSON keys are texts
        letters = [lookup.get(number, letter) for number, letter in enumerate(_LETTERS)]
        self._letters = str.maketrans(dict(zip(_LETTERS, letters, strict=True)))
        vocabulary = grid_vocab or dict(zip(letters, _MEANINGS, strict=True))
        self.instructions = env_instruction or _INSTRUCTIONS.format(
            letters=", ".join(f"{letter} {meaning}" for letter, meaning in vocabulary.items()),
            moves=", ".join(f"<answer>{move}</answer>" for move in self._moves),
        )

    def _draw(self) -> str:
        return draw_room(self.room).translate(self._letters)

    def _parse_move(self, action: str) -> str | None:
        """Return the move that the answer names, where the pattern matches if there is one."""
        found = action if self._pattern is None else find_pattern(action, self._pattern)
        return None if found is None else extract_choice(found, list(self._moves))

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        self.solution: tuple[str, ...] = ()
        if "room" in data:
            self.room = parse_room(str(data["room"]))
        else:
            self.room, self.solution = make_room(seed, depth=self._depth, **self._sizes)
        return self._draw()

    def step(self, action: str) -> Reply:
        move = self._parse_move(action)
        if move is None:
            text = f"That is not a move. Answer with one of {', '.join(self._moves)}.\n{self._draw()}"
            return Reply(text, -self._step_penalty, valid=False)
        before, self.room = self.room, apply_move(self.room, self._moves[move])
        reward = self._box_reward * (self.room.boxes_on_targets - before.boxes_on_targets) - self._step_penalty
        drawing = self._draw()
        if self.room.is_solved:
            return Reply(drawing, reward + self._finish_reward, done=True, success=True)
        has_moved = self.room is not before
        text = drawing if has_moved else f"You cannot move there.\n{drawing}"
        return Reply(text, reward, info={"effective": has_moved})


def draw_room(room: SokobanRoom) -> str:
    """Draw the room in letters, one line per row."""

    def letter(cell: Cell) -> str:
        if cell not in room.floor:
            return "#"
        on_target = cell in room.targets
        if cell == room.player:
            return "S" if on_target else "P"
        if cell in room.boxes:
            return "√" if on_target else "X"
        return "O" if on_target else "_"

    return "\n".join("".join(letter((row, column)) for column in range(room.columns)) for row in range(room.rows))


def parse_room(drawing: str) -> SokobanRoom:
    """Parse a drawing. Raises `ConfigError`."""
    lines = drawing.strip().splitlines()
    letters = {(row, column): letter for row, line in enumerate(lines) for column, letter in enumerate(line.strip())}

    def find(wanted: str) -> frozenset[Cell]:
        return frozenset(cell for cell, letter in letters.items() if letter in wanted)

    players, boxes, targets = find("PS"), find("X√"), find("O√S")
    if len(players) != 1 or not boxes or len(boxes) != len(targets) or set("".join(lines)) - set("#_OX√PS"):
        problem = "needs one player, as many boxes as targets, and no other letters than #_OX√PS"
        raise ConfigError(problem, key="room", value=drawing)
    rows, columns, floor = len(lines), max(map(len, lines)), frozenset(letters) - find("#")
    player = next(iter(players))
    return SokobanRoom(rows=rows, columns=columns, floor=floor, targets=targets, boxes=boxes, player=player)


def apply_move(room: SokobanRoom, move: str) -> SokobanRoom:
    """Return the room after a move; the same object if a wall or a second box blocks it."""
    ahead = _neighbour_cell(room.player, MOVES[move])
    if ahead not in room.floor:
        return room
    boxes = room.boxes
    if ahead in boxes:
        behind = _neighbour_cell(ahead, MOVES[move])
        if behind not in room.floor or behind in boxes:
            return room
        boxes = boxes - {ahead} | {behind}
    return replace(room, boxes=boxes, player=ahead)


def make_room(seed: int, *, rows: int, columns: int, boxes: int, depth: int) -> tuple[SokobanRoom, tuple[str, ...]]:
    """Return a room and the moves that solve it. Raises `ConfigError` if no such room is found."""
    best: tuple[int, SokobanRoom, tuple[str, ...]] | None = None
    for attempt in range(max(4, _SEARCH_EFFORT // (rows * columns * boxes))):
        rng = make_rng(seed, "sokoban", rows, columns, boxes, depth, attempt)
        floor = _carve_floor(rng, rows, columns, boxes)
        cells = shuffle_items(rng, sorted(floor))
        position = _search_backwards(rng, floor, tuple(cells[:boxes]), cells[boxes], depth)
        targets, moved = frozenset(cells[:boxes]), frozenset(position.boxes)
        room = SokobanRoom(
            rows=rows, columns=columns, floor=floor, targets=targets, boxes=moved, player=position.player
        )
        if room.boxes_on_targets < (best[0] if best else boxes):
            best = room.boxes_on_targets, room, position.solution
        if best and best[0] == 0:
            break
    if best is None:
        problem = f"no room of {rows}×{columns} with {boxes} boxes was found"
        raise ConfigError(problem, key="num_boxes", value=boxes, hint="a larger room, or more steps")
    return best[1], _shortest_prefix(best[1], best[2])


def _shortest_prefix(room: SokobanRoom, solution: tuple[str, ...]) -> tuple[str, ...]:
    """Cut a solution where it first solves the room: boxes may stand on each other's targets before its end."""
    for count, move in enumerate(solution, 1):
        room = apply_move(room, move)
        if room.is_solved:
            return solution[:count]
    return solution


def _neighbour_cell(cell: Cell, step: Cell, times: int = 1) -> Cell:
    return cell[0] + times * step[0], cell[1] + times * step[1]


def _carve_floor(rng: Rng, rows: int, columns: int, boxes: int) -> frozenset[Cell]:
    """Return a connected floor, two cells wide in places so that the player can walk around boxes."""
    inner = [(row, column) for row in range(1, rows - 1) for column in range(1, columns - 1)]
    wanted = min(len(inner), max(boxes * 2 + 4, round(len(inner) * (0.55 + 0.25 * rng.random()))))
    cell = choose_item(rng, inner)
    floor = {cell}
    steps = list(MOVES.values())
    step = choose_item(rng, steps)
    while len(floor) < wanted:
        if rng.random() < 0.4:
            step = choose_item(rng, steps)
        following = _neighbour_cell(cell, step)
        if not (0 < following[0] < rows - 1 and 0 < following[1] < columns - 1):
            step = choose_item(rng, steps)
            continue
        cell = following
        floor.add(cell)
        side = _neighbour_cell(cell, (step[1], step[0]))
        if rng.random() < 0.3 and 0 < side[0] < rows - 1 and 0 < side[1] < columns - 1:
            floor.add(side)
    return frozenset(floor)


@dataclass(frozen=True, slots=True)
class _Position:
    player: Cell
    boxes: tuple[Cell, ...]
    """Boxes in the order of the targets they came from."""
    solution: tuple[str, ...] = ()
    """The moves from here to the solved room."""

    @property
    def key(self) -> tuple[Cell, tuple[Cell, ...]]:
        return self.player, tuple(sorted(self.boxes))


def _search_backwards(
    rng: Rng, floor: frozenset[Cell], targets: tuple[Cell, ...], player: Cell, depth: int
) -> _Position:
    """Return the position farthest from the solved room that was found."""

    def distance(position: _Position) -> tuple[int, int]:
        off_target = sum(box not in targets for box in position.boxes)
        way = sum(abs(a - c) + abs(b - d) for (a, b), (c, d) in zip(position.boxes, targets, strict=True))
        return off_target, way

    beam = [_Position(player, targets)]
    seen = {beam[0].key}
    best, most = beam[0], (0, 0)
    for _ in range(depth):
        following: list[_Position] = []
        for earlier in (position for after in beam for position in _previous_positions(after, floor)):
            if earlier.key not in seen:
                seen.add(earlier.key)
                following.append(earlier)
        following.sort(key=lambda position: (distance(position), rng.random()), reverse=True)
        beam = following[:_BEAM_WIDTH]
        if beam and distance(beam[0]) >= most:
            best, most = beam[0], distance(beam[0])
    return best


def _previous_positions(after: _Position, floor: frozenset[Cell]) -> Iterator[_Position]:
    """Yield the positions from which one move leads to `after`: the player walked here, or pushed a box."""
    for move, step in MOVES.items():
        origin = _neighbour_cell(after.player, step, -1)
        if origin not in floor or origin in after.boxes:
            continue
        solution = (move, *after.solution)
        yield _Position(origin, after.boxes, solution)
        pushed = _neighbour_cell(after.player, step)
        if pushed in after.boxes:
            boxes = tuple(after.player if box == pushed else box for box in after.boxes)
            yield _Position(origin, boxes, solution)
