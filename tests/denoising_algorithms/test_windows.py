"""Where the noise is: windows that fit, in the first half, or sliding."""

from __future__ import annotations

from collections import Counter

import pytest

from headway.algorithms.denoising import StepWindow, draw_random_window, make_full_window, make_sliding_window
from headway.errors import ConfigError
from headway.seeding import make_rng


def test_a_window_knows_its_steps() -> None:
    window = StepWindow(2, 3)
    assert [step for step in range(10) if step in window] == [2, 3, 4] and window.end == 5


def test_the_full_window_is_every_step_but_the_one_onto_the_data() -> None:
    assert make_full_window(10) == StepWindow(0, 9)


def test_random_windows_lie_in_the_first_half_and_start_anywhere_in_it() -> None:
    rng = make_rng(3, "windows")
    starts = Counter(draw_random_window(12, 2, rng).start for _ in range(1000))
    assert sorted(starts) == [0, 1, 2, 3, 4]
    assert min(starts.values()) > 150


def test_a_random_window_wider_than_the_half_starts_at_the_noise() -> None:
    assert draw_random_window(6, 4, make_rng(0, "windows")) == StepWindow(0, 4)


def test_the_sliding_window_moves_with_training_and_begins_again() -> None:
    windows = [make_sliding_window(6, 2, update, interval=2) for update in range(10)]
    assert [window.start for window in windows] == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0]
    assert all(window.length == 2 and window.end <= 5 for window in windows)
    assert [make_sliding_window(8, 3, update, interval=1, stride=2).start for update in range(4)] == [0, 2, 4, 0]


@pytest.mark.parametrize("width", [0, 6])
def test_a_window_that_does_not_fit_is_refused(width: int) -> None:
    with pytest.raises(ConfigError, match=f"sde_window_size = {width}: does not fit into 6 denoising steps"):
        draw_random_window(6, width, make_rng(0, "windows"))
    with pytest.raises(ConfigError, match="sde_window_size"):
        make_sliding_window(6, width, 0)


def test_one_step_leaves_nothing_to_train() -> None:
    with pytest.raises(ConfigError, match="num_inference_steps = 1"):
        make_full_window(1)
