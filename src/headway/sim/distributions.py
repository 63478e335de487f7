"""Makes functions that draw latencies and lengths from the distributions of a configuration.

A sampler holds no state: it draws from the random generator of its caller.
"""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

from headway.config.simulation_config import DistributionConfig
from headway.errors import ConfigError
from headway.seeding import Rng

ValueSampler = Callable[[Rng], float]


def make_sampler(distribution: DistributionConfig, *, key: str = "simulation") -> ValueSampler:
    """Return a function that draws from `distribution`, clipped. `key` names it in errors. Raises `ConfigError`."""
    _check_distribution(distribution, key)
    draw = _make_unclipped_sampler(distribution, key)
    low, high = distribution.min, math.inf if distribution.max is None else distribution.max
    if distribution.kind == "fixed":
        value = min(max(distribution.mean, low), high)
        return lambda rng: value
    return lambda rng: min(max(draw(rng), low), high)


def make_score_sampler(
    distribution: DistributionConfig, *, key: str = "simulation", least: int = 1
) -> Callable[[float], int]:
    """Return a function that turns a standard normal score into a count of the same distribution, never below `least`.

    Scores that are correlated give correlated counts, whatever the distribution is.
    """
    _check_distribution(distribution, key)
    at_score = _make_quantiles(distribution, key)
    low, high = distribution.min, math.inf if distribution.max is None else distribution.max
    return lambda score: max(round(min(max(at_score(score), low), high)), least)


def _make_quantiles(distribution: DistributionConfig, key: str) -> Callable[[float], float]:
    mean, std = distribution.mean, distribution.std
    if distribution.kind == "lognormal":
        mu, sigma = _compute_log_moments(mean, std)
        return lambda score: math.exp(mu + sigma * score)
    if distribution.kind == "empirical":
        values = sorted(_read_numbers(distribution.file, key))
        cdf = NormalDist().cdf
        return lambda score: values[min(int(cdf(score) * len(values)), len(values) - 1)]
    return lambda score: mean + std * score if distribution.kind == "gaussian" else mean


def _compute_log_moments(mean: float, std: float) -> tuple[float, float]:
    """Return mean and deviation of the logarithm of a lognormal value."""
    variance = math.log1p((std / mean) ** 2)
    return math.log(mean) - variance / 2, math.sqrt(variance)


def make_count_sampler(
    distribution: DistributionConfig, *, key: str = "simulation", least: int = 1
) -> Callable[[Rng], int]:
    """Return a sampler of counts (tokens, turns): rounded, and never below `least`."""
    draw = make_sampler(distribution, key=key)
    return lambda rng: max(round(draw(rng)), least)


def _make_unclipped_sampler(distribution: DistributionConfig, key: str) -> ValueSampler:
    mean, std = distribution.mean, distribution.std
    if distribution.kind == "gaussian":
        return lambda rng: rng.gauss(mean, std)
    if distribution.kind == "lognormal":
        mu, sigma = _compute_log_moments(mean, std)
        return lambda rng: math.exp(rng.gauss(mu, sigma))
    if distribution.kind == "empirical":
        values = _read_numbers(distribution.file, key)
        return lambda rng: values[rng.randrange(0, len(values))]
    return lambda rng: mean


def _check_distribution(distribution: DistributionConfig, key: str) -> None:
    if distribution.std < 0:
        raise ConfigError("a standard deviation is not negative", key=f"{key}.std", value=distribution.std)
    if distribution.kind == "lognormal" and distribution.mean <= 0:
        raise ConfigError("a lognormal has a positive mean", key=f"{key}.mean", value=distribution.mean)
    if distribution.max is not None and distribution.max < distribution.min:
        raise ConfigError(f"below min = {distribution.min}", key=f"{key}.max", value=distribution.max)


def _read_numbers(file: str | None, key: str) -> tuple[float, ...]:
    """Return the numbers of an `empirical` distribution."""
    if file is None:
        raise ConfigError("an empirical distribution needs a file", key=f"{key}.file", hint=_FILE_HINT)
    return tuple(value for row in read_length_rows(file, f"{key}.file") for value in row)


_FILE_HINT = "one number a line, or the numbers of one prompt a line"


def read_length_rows(file: str, key: str) -> list[tuple[float, ...]]:
    """Return the numbers of each line of a file; empty lines are skipped. Raises `ConfigError`, which names `key`."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", key=key, value=file) from error
    rows = [
        tuple(_parse_number(text, f"line {number}", key, file) for text in line.replace(",", " ").split())
        for number, line in enumerate(lines, 1)
    ]
    if not any(rows):
        raise ConfigError("holds no numbers", key=key, value=file, hint=_FILE_HINT)
    return [row for row in rows if row]


def _parse_number(text: str, where: str, key: str, file: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{where} is not a number: {text!r}", key=key, value=file) from None
    if not math.isfinite(value):
        raise ConfigError(f"{where} is not finite: {text!r}", key=key, value=file)
    return value
