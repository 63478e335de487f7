"""Small runs on the virtual clock that show what a document promises."""

from pathlib import Path
from typing import Any

from headway.config.simulation_config import DistributionConfig, SimulatedTrainerConfig
from headway.sim.simulated_run import Scenario
from tests.flow.factory import Played, make_costs, make_engine_cost, make_scenario, play_through

LONG_TAIL = DistributionConfig(kind="lognormal", mean=100, std=150, min=1, max=2000)


def play(run_dir: Path, *, tail: bool = False, engines: int = 2, costs: Any = None, **settings: Any) -> Played:
    """Play a run of eight steps of four groups; an answer takes about a second, and so does a step."""
    if costs is None:
        costs = make_costs(engine=make_engine_cost(slots=4), **({"response_tokens": LONG_TAIL} if tail else {}))
    settings = {"groups_per_step": 4, "max_steps": 8, **settings}
    return play_through(make_scenario(engines=engines, costs=costs, **settings), run_dir)


def make_planned_scenario() -> Scenario:
    """Make a small world with a long tail, and as much training as generation, for the planner."""
    costs = make_costs(
        engine=make_engine_cost(slots=4, step_per_request_s=0.002),
        response_tokens=LONG_TAIL,
        trainer=SimulatedTrainerConfig(gpu_s_per_token=0.004),
    )
    return make_scenario(costs=costs, groups_per_step=8)


def lags(played: Played) -> list[int]:
    """Return the lag of every trained group, in order."""
    return [event.data["trained"] - event.data["oldest"] for event in played.of("group.train")]


def duration_s(played: Played) -> float:
    """Return the time from the first event to the end of the last step."""
    return played.of("step.end")[-1].time_s - played.events[0].time_s


def step_windows(played: Played) -> list[tuple[float, float]]:
    """Return when each training step began and ended."""
    ends = [event.time_s for event in played.of("step.end")]
    return list(zip([event.time_s for event in played.of("step.begin")], ends, strict=True))


def starts_inside(played: Played, kind: str, windows: list[tuple[float, float]]) -> int:
    """Return how many events of a kind lie inside one of the windows."""
    return sum(any(begin < event.time_s < end for begin, end in windows) for event in played.of(kind))
