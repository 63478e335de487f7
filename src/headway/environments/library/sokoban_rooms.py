"""Sokoban rooms from a seed, made by playing backwards, and the rules of moving in them.

Guarantees: the same seed and sizes give the same room; every room has a solution of at most `depth` moves, which comes
with it. At the start no box stands on a target; in rooms that are crowded for their `depth`, as few as were found, and
never all. A solution is found, not proven shortest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headway.errors import ConfigError
from headway.seeding import Rng, seeded

Cell = tuple[int, int]
"""Row and column."""
MOVES: dict[str, Cell] = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
_EFFORT = 2000
"""Rooms that are tried before one with boxes on targets is taken, times their cells and boxes."""
_BEAM = 120
"""Positions kept at each depth of the backward search; small rooms have fewer and are searched wholly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Walls and targets stay; player and boxes move."""

    rows: int
    columns: int
    floor: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def placed(self) -> int:
        """Boxes on targets."""
        return len(self.boxes & self.targets)

    @property
    def solved(self) -> bool:
        return self.boxes == self.targets


def moved(room: Room, move: str) -> Room:
    """The room after a move; the same object where a wall or a second box is in the way."""
    ahead = _beside(room.player, MOVES[move])
    if ahead not in room.floor:
        return room
    boxes = room.boxes
    if ahead in boxes:
        behind = _beside(ahead, MOVES[move])
        if behind not in room.floor or behind in boxes:
            return room
        boxes = boxes - {ahead} | {behind}
    return Room(rows=room.rows, columns=room.columns, floor=room.floor, targets=room.targets, boxes=boxes, player=ahead)


def make_room(seed: int, *, rows: int, columns: int, boxes: int, depth: int) -> tuple[Room, tuple[str, ...]]:
    """A room and the moves that solve it. Raises `ConfigError` where such a room is not found."""
    best: tuple[int, Room, tuple[str, ...]] | None = None
    for attempt in range(max(4, _EFFORT // (rows * columns * boxes))):
        rng = seeded(seed, "sokoban", rows, columns, boxes, depth, attempt)
        floor = _carve(rng, rows, columns, boxes)
        cells = _shuffled(rng, sorted(floor))
        position, solution = _played_backwards(rng, floor, tuple(cells[:boxes]), cells[boxes], depth)
        room = Room(
            rows=rows,
            columns=columns,
            floor=floor,
            targets=frozenset(cells[:boxes]),
            boxes=frozenset(position.boxes),
            player=position.player,
        )
        if room.placed < (best[0] if best else boxes):
            best = room.placed, room, solution
        if best and best[0] == 0:
            break
    if best is None:
        problem = f"no room of {rows}×{columns} with {boxes} boxes was found"
        raise ConfigError(problem, key="num_boxes", value=boxes, hint="a larger room, or more steps")
    return best[1], _shortest_prefix(best[1], best[2])


def _shortest_prefix(room: Room, solution: tuple[str, ...]) -> tuple[str, ...]:
    """A way backwards may lead through another solved position, with boxes on each other's targets."""
    for count, move in enumerate(solution, 1):
        room = moved(room, move)
        if room.solved:
            return solution[:count]
    return solution


def _beside(cell: Cell, step: Cell, times: int = 1) -> Cell:
    return cell[0] + times * step[0], cell[1] + times * step[1]


def _shuffled(rng: Rng, cells: list[Cell]) -> list[Cell]:
    order = list(range(len(cells)))
    rng.shuffle(order)
    return [cells[place] for place in order]


def _carve(rng: Rng, rows: int, columns: int, boxes: int) -> frozenset[Cell]:
    """A connected floor, two cells wide here and there so that boxes can be walked around."""
    inner = [(row, column) for row in range(1, rows - 1) for column in range(1, columns - 1)]
    wanted = min(len(inner), max(boxes * 2 + 4, round(len(inner) * (0.55 + 0.25 * rng.random()))))
    place = inner[rng.randrange(0, len(inner))]
    floor = {place}
    steps = list(MOVES.values())
    step = steps[rng.randrange(0, 4)]
    while len(floor) < wanted:
        if rng.random() < 0.4:
            step = steps[rng.randrange(0, 4)]
        following = _beside(place, step)
        if not (0 < following[0] < rows - 1 and 0 < following[1] < columns - 1):
            step = steps[rng.randrange(0, 4)]
            continue
        place = following
        floor.add(place)
        side = _beside(place, (step[1], step[0]))
        if rng.random() < 0.3 and 0 < side[0] < rows - 1 and 0 < side[1] < columns - 1:
            floor.add(side)
    return frozenset(floor)


@dataclass(frozen=True, slots=True)
class _Position:
    player: Cell
    boxes: tuple[Cell, ...]
    """In the order of the targets they came from."""
    came: tuple[_Position, str] | None = None
    """Where the forward move leads, and that move."""

    @property
    def key(self) -> tuple[Cell, tuple[Cell, ...]]:
        return self.player, tuple(sorted(self.boxes))


def _played_backwards(
    rng: Rng, floor: frozenset[Cell], targets: tuple[Cell, ...], player: Cell, depth: int
) -> tuple[_Position, tuple[str, ...]]:
    """From the solved room, the position farthest from it, and the way back."""

    def distance(position: _Position) -> tuple[int, int]:
        off = sum(box not in targets for box in position.boxes)
        way = sum(abs(a - c) + abs(b - d) for (a, b), (c, d) in zip(position.boxes, targets, strict=True))
        return off, way

    beam = [_Position(player, targets)]
    seen = {beam[0].key}
    best, most = beam[0], (0, 0)
    for _ in range(depth):
        following: list[_Position] = []
        for earlier in (position for after in beam for position in _before(after, floor)):
            if earlier.key not in seen:
                seen.add(earlier.key)
                following.append(earlier)
        following.sort(key=lambda position: (distance(position), rng.random()), reverse=True)
        beam = following[:_BEAM]
        if beam and distance(beam[0]) >= most:
            best, most = beam[0], distance(beam[0])
    return best, _way_on(best)


def _before(after: _Position, floor: frozenset[Cell]) -> Iterator[_Position]:
    """Positions from which one move leads to `after`: the player walked here, or pushed a box."""
    for move, step in MOVES.items():
        origin = _beside(after.player, step, -1)
        if origin not in floor or origin in after.boxes:
            continue
        yield _Position(origin, after.boxes, (after, move))
        pushed = _beside(after.player, step)
        if pushed in after.boxes:
            boxes = tuple(after.player if box == pushed else box for box in after.boxes)
            yield _Position(origin, boxes, (after, move))


def _way_on(position: _Position) -> tuple[str, ...]:
    moves: list[str] = []
    while position.came is not None:
        position, move = position.came
        moves.append(move)
    return tuple(moves)
