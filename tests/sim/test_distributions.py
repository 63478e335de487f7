from __future__ import annotations

from pathlib import Path
from statistics import fmean, pstdev

import pytest

from headway.config.simulation_config import DistributionConfig
from headway.errors import ConfigError
from headway.seeding import make_rng
from headway.sim.distributions import make_count_sampler, make_sampler

DRAWS = 20_000


def draws(distribution: DistributionConfig) -> list[float]:
    draw, rng = make_sampler(distribution), make_rng(1, "latency")
    return [draw(rng) for _ in range(DRAWS)]


def test_fixed_is_fixed_and_clipped() -> None:
    assert set(draws(DistributionConfig(mean=3.0))) == {3.0}
    assert set(draws(DistributionConfig(mean=3.0, max=2.0))) == {2.0}


@pytest.mark.parametrize("kind", ["gaussian", "lognormal"])
def test_mean_and_deviation_are_those_asked_for(kind: str) -> None:
    values = draws(DistributionConfig(kind=kind, mean=100.0, std=20.0))  # type: ignore[arg-type]
    assert fmean(values) == pytest.approx(100.0, rel=0.02)
    assert pstdev(values) == pytest.approx(20.0, rel=0.05)


def test_a_wide_lognormal_has_its_mean() -> None:
    values = draws(DistributionConfig(kind="lognormal", mean=2000.0, std=2000.0))
    assert fmean(values) == pytest.approx(2000.0, rel=0.05)


def test_draws_are_clipped() -> None:
    values = draws(DistributionConfig(kind="gaussian", mean=1.0, std=5.0, max=4.0))
    assert min(values) == 0.0 and max(values) == 4.0


def test_no_spread_is_no_spread() -> None:
    assert draws(DistributionConfig(kind="lognormal", mean=5.0)) == pytest.approx([5.0] * DRAWS)


def test_whole_numbers_have_a_least() -> None:
    draw, rng = make_count_sampler(DistributionConfig(kind="gaussian", mean=1.0, std=3.0)), make_rng(1)
    values = [draw(rng) for _ in range(100)]
    assert min(values) == 1 and all(isinstance(value, int) for value in values)


def test_empirical_draws_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("1\n\n2.5\n4\n")
    values = draws(DistributionConfig(kind="empirical", file=str(file)))
    assert set(values) == {1.0, 2.5, 4.0}
    assert fmean(values) == pytest.approx(2.5, rel=0.02)


@pytest.mark.parametrize(("text", "problem"), [("", "no numbers"), ("1\nx\n", "line 2"), ("inf\n", "not finite")])
def test_a_bad_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        make_sampler(DistributionConfig(kind="empirical", file=str(file)))


@pytest.mark.parametrize(
    ("distribution", "problem"),
    [
        (DistributionConfig(kind="empirical"), "needs a file"),
        (DistributionConfig(kind="empirical", file="no such file"), "cannot be read"),
        (DistributionConfig(kind="gaussian", std=-1.0), "negative"),
        (DistributionConfig(kind="lognormal"), "positive mean"),
        (DistributionConfig(min=3.0, max=2.0), "below min"),
    ],
)
def test_a_distribution_that_cannot_be_is_refused(distribution: DistributionConfig, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_sampler(distribution, key="simulation.x")
