"""Sokoban: rooms that can be solved, rules that hold, rewards that add up."""

from __future__ import annotations

import pytest

from headway.environments.library.sokoban import MOVES, Sokoban, apply_move, draw_room, make_room, parse_room
from headway.errors import ConfigError
from headway.seeding import make_rng

SIZES = [(6, 6, 1, 10), (6, 6, 2, 30), (5, 8, 1, 20), (7, 7, 3, 30)]


@pytest.mark.parametrize(("rows", "columns", "boxes", "depth"), SIZES)
def test_every_room_is_solved_by_the_moves_that_come_with_it(rows: int, columns: int, boxes: int, depth: int) -> None:
    for seed in range(12):
        room, solution = make_room(seed, rows=rows, columns=columns, boxes=boxes, depth=depth)
        assert 0 < len(solution) <= depth
        assert room.boxes_on_targets == 0 and len(room.boxes) == len(room.targets) == boxes
        assert all(0 < row < rows - 1 and 0 < column < columns - 1 for row, column in room.floor), "walls around"
        for move in solution:
            following = apply_move(room, move)
            assert following is not room, "no move of a solution is in vain"
            room = following
        assert room.is_solved


def test_crowded_rooms_begin_unsolved_too() -> None:
    for seed in range(4):
        room, solution = make_room(seed, rows=6, columns=6, boxes=5, depth=12)
        assert room.boxes_on_targets < 5 and solution
        for move in solution:
            room = apply_move(room, move)
        assert room.is_solved


def test_the_seed_decides_the_room() -> None:
    one, other = Sokoban(), Sokoban()
    assert [one.reset(seed, {}) for seed in range(20)] == [other.reset(seed, {}) for seed in range(20)]
    assert len({one.reset(seed, {}) for seed in range(20)}) > 15


def test_the_solution_earns_the_end_and_every_box() -> None:
    world = Sokoban(num_boxes=2, max_steps=40)
    for seed in range(10):
        world.reset(seed, {})
        replies = [world.step(f"<think>I could go Down.</think><answer>{move}</answer>") for move in world.solution]
        assert [reply.done for reply in replies] == [False] * (len(replies) - 1) + [True]
        assert replies[-1].success and all(reply.valid for reply in replies)
        assert sum(reply.reward for reply in replies) == pytest.approx(10 + 2 - 0.1 * len(replies))


def test_chance_rarely_solves_a_room() -> None:
    world, rng, moves = Sokoban(), make_rng(0, "chance"), list(MOVES)
    solved = 0
    for seed in range(40):
        world.reset(seed, {})
        solved += any(world.step(moves[rng.randrange(0, 4)]).done for _ in range(world.max_steps))
    assert solved < 20


ROOM = """
#######
#PX_O_#
#_X__O#
#######
"""


def test_boxes_are_pushed_never_pulled_and_never_two_at_once() -> None:
    world = Sokoban()
    world.reset(0, {"room": ROOM})
    assert draw_room(world.room) == ROOM.strip()
    assert world.step("Right").info["effective"]
    assert "#_PXO_#" in draw_room(world.room)
    world.step("Left")
    assert "#P_XO_#" in draw_room(world.room), "walking away leaves the box"
    world.step("Right")
    placed = world.step("Right")
    assert placed.reward == pytest.approx(0.9) and "√" in placed.text
    off = world.step("Right")
    assert off.reward == pytest.approx(-1.1) and "#___SX#" in off.text
    against_the_wall = world.step("Right")
    assert not against_the_wall.info["effective"] and "cannot" in against_the_wall.text
    two = parse_room("######\n#PXX_#\n#OO__#\n######")
    assert apply_move(two, "Right") is two


@pytest.mark.parametrize("said", ["", "jump", "Up or Down?", "<answer></answer>", "upwards"])
def test_what_is_no_move_changes_nothing(said: str) -> None:
    world = Sokoban()
    before = world.reset(3, {})
    reply = world.step(said)
    assert not reply.valid and reply.reward < 0 and not reply.done
    assert draw_room(world.room) == before and before in reply.text


def test_sizes_that_cannot_be_are_refused() -> None:
    for options in (
        {"dim_room": (3, 6)},
        {"dim_room": (4, 4)},
        {"dim_room": (6,)},
        {"num_boxes": 0},
        {"num_boxes": 9},
        {"max_steps": 0},
    ):
        with pytest.raises(ConfigError):
            Sokoban(**options)  # type: ignore[arg-type]
    for drawing in ("####", "#P_X#", "#PXO#PX", "#P?XO#"):
        with pytest.raises(ConfigError, match="one player"):
            parse_room(drawing)
