"""Plans how to split GPUs between trainer and engines, and which α to use.

    plan = plan_gpu_split(scenario, gpus=40, alphas=(0, 1, 2, 4))
    plan.options[0].seconds_per_step
    recommend_split(plan)

A coarse pass estimates all options, then the best few are simulated and ranked by trained tokens per second, so that
short answers alone win nothing. The synchronous run on all GPUs (trainer and engines take turns, α = 0) is always among
them, because asynchrony has to beat it. Faults, checkpoints and validation are left out. Large batches are folded
(`folded_scenario`), which makes tails slightly too short.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from headway.errors import ConfigError
from headway.monitor.run_report import RunMonitor, RunReport
from headway.sim.folded_scenario import choose_fold, fold_scenario
from headway.sim.simulated_run import Scenario, run_scenario
from headway.sim.step_estimate import StepEstimate, draw_workload, estimate_step, estimate_train_s

_MOST_SIMULATIONS = 10
_MOST_SPLITS = 16
_MEASURED_STEPS = 4
SplitCheck = Callable[[int, int], str]
"""Takes the GPUs that train and those that generate (0: all are shared); returns why `train` refuses them, or \"\"."""
_STALE_REASONS = ("stale_in_flight", "stale_in_queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSplitOption:
    """One way to use the GPUs, simulated."""

    alpha: float
    train_gpus: int
    infer_gpus: int
    colocated: bool
    """Whether trainer and engines take turns on the same GPUs."""
    seconds_per_step: float
    estimated_s: float
    """Seconds per step that the coarse pass expected."""
    lag_mean: float
    train_busy: float
    """Share of the time in which the trainer's GPUs work."""
    generate_busy: float
    """Share of the time in which an engine has at least one request."""
    slots_filled: float
    """Share of the engines' slots that are in use."""
    stale_share: float
    """Share of samples dropped for being too old."""
    drop_share: float
    """Share of samples dropped for any reason."""
    tokens_per_s: float
    """Tokens trained per second, of the whole batch."""
    trained_length: float
    """Mean tokens of a trained sample."""
    refused: str = ""
    """Why `train` refuses it; only the synchronous run is shown nevertheless, to compare with."""
    finished: bool = True

    @property
    def name(self) -> str:
        """Short name such as `16T24I α=2` or `sync 40`."""
        return f"sync {self.train_gpus}" if self.colocated else f"{self.train_gpus}T{self.infer_gpus}I α={self.alpha:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSplitPlan:
    """Every simulated option, the one that trains most tokens per second first."""

    gpus: int
    scale: int
    """Batch and engines were simulated at down to 1/scale of their size."""
    considered: int
    """Options that the coarse pass looked at."""
    options: tuple[GpuSplitOption, ...]
    synchronous: GpuSplitOption
    estimate: StepEstimate
    """Estimated parts of the synchronous step."""

    @property
    def best_asynchronous(self) -> GpuSplitOption | None:
        """Fastest option with separate pools; None if the GPUs cannot be split."""
        return next((option for option in self.options if not option.colocated), None)

    def speed_up(self, option: GpuSplitOption) -> float:
        """Return how many times as many tokens per second an option trains as the synchronous run on all GPUs."""
        return option.tokens_per_s / self.synchronous.tokens_per_s


@dataclass(frozen=True, slots=True)
class _Candidate:
    alpha: float
    infer_gpus: int
    """0 if trainer and engines are colocated on all GPUs."""


class _Search:
    """The candidates of one plan, and those that have been simulated."""

    def __init__(
        self,
        base: Scenario,
        gpus: int,
        trainer_gpus: int,
        *,
        check: SplitCheck,
        on_option: Callable[[GpuSplitOption], None],
    ) -> None:
        self.base, self.gpus, self._check, self._on_option = base, gpus, check, on_option
        self.work = draw_workload(base)
        self.options: dict[_Candidate, GpuSplitOption] = {}
        self.scale = 1
        """Largest fold of the scenarios simulated so far."""
        unit = base.simulation.engine.gpus
        whole = [infer for infer in range(unit, gpus, unit) if (gpus - infer) % trainer_gpus == 0]
        accepted = [infer for infer in whole if not check(gpus - infer, infer)]
        self.splits = accepted[:: ceil(len(accepted) / _MOST_SPLITS)] if accepted else []
        """GPUs that the engines may have: the rest are whole copies of the trainer, and `train` accepts the split."""

    def scenario(self, candidate: _Candidate) -> Scenario:
        """Return the scenario of a candidate at full size."""
        every = tuple(range(self.gpus))
        train = every[: self.gpus - candidate.infer_gpus]
        settings = replace(
            self.base.settings,
            pipeline_depth=None,
            save_steps=0,
            eval_steps=0,
            async_generation_ratio=candidate.alpha,
            updates_per_sync=self.base.settings.updates_per_sync if candidate.infer_gpus else 1,
            hybrid_engine=not candidate.infer_gpus,
            max_steps=ceil(candidate.alpha) + 2 + _MEASURED_STEPS,
        )
        return replace(
            self.base,
            settings=settings,
            simulation=replace(self.base.simulation, faults=()),
            train_devices=train,
            infer_devices=every[len(train) :] if candidate.infer_gpus else train,
        )

    def estimate(self, candidate: _Candidate) -> StepEstimate:
        return estimate_step(self.scenario(candidate), self.work)

    def simulate(self, candidate: _Candidate) -> None:
        """Simulate a candidate, unless it was simulated before or enough were."""
        if candidate in self.options or len(self.options) >= _MOST_SIMULATIONS:
            return
        full = self.scenario(candidate)
        monitor, fold = RunMonitor(full.settings.max_steps - _MEASURED_STEPS), choose_fold(full)
        summary = run_scenario(fold_scenario(full, fold), sinks=[monitor])
        option = _make_option(full, monitor.report(), self.estimate(candidate).step_s, fold, summary.finished)
        if not candidate.infer_gpus:
            option = replace(option, refused=self._check(self.gpus, 0))
        self.options[candidate] = option
        self.scale = max(self.scale, fold)
        self._on_option(option)

    def neighbours(self, candidate: _Candidate, alphas: Sequence[float]) -> Iterator[_Candidate]:
        """Yield the splits to either side, then the other values of α."""
        splits = self.splits
        at = splits.index(candidate.infer_gpus)
        for infer in splits[max(at - 1, 0) : at + 2]:
            yield replace(candidate, infer_gpus=infer)
        for alpha in alphas:
            yield replace(candidate, alpha=alpha)


def plan_gpu_split(
    scenario: Scenario,
    *,
    gpus: int,
    alphas: Sequence[float] = (0.0, 1.0, 2.0, 4.0),
    trainer_gpus: int = 1,
    check: SplitCheck = lambda train, infer: "",
    on_option: Callable[[GpuSplitOption], None] = lambda option: None,
) -> GpuSplitPlan:
    """Rank the ways to use `gpus` GPUs. `on_option` is called with each as soon as it is simulated."""
    _check_request(scenario, gpus, alphas, trainer_gpus)
    search = _Search(scenario, gpus, trainer_gpus, check=check, on_option=on_option)
    synchronous = _Candidate(0.0, 0)
    least = scenario.settings.updates_per_sync - 1  # train refuses less
    ahead = sorted({alpha for alpha in alphas if alpha > 0 and alpha >= least})
    candidates = [_Candidate(alpha, infer) for alpha in ahead for infer in search.splits]
    search.simulate(synchronous)
    for alpha in ahead:
        same = [candidate for candidate in candidates if candidate.alpha == alpha]
        if same:
            search.simulate(min(same, key=lambda candidate: search.estimate(candidate).step_s))
    _search_neighbours(search, ahead)
    options = sorted(search.options.values(), key=lambda option: (-round(option.tokens_per_s, 3), option.alpha))
    return GpuSplitPlan(
        gpus=gpus,
        scale=search.scale,
        considered=len(candidates) + 1,
        options=tuple(options),
        synchronous=search.options[synchronous],
        estimate=search.estimate(synchronous),
    )


def choose_split(scenario: Scenario, gpus: int) -> int:
    """Return how many of `gpus` GPUs should generate at the scenario's α, by the coarse estimate alone."""
    search = _Search(scenario, gpus, 1, check=lambda train, infer: "", on_option=lambda option: None)
    candidates = [_Candidate(scenario.settings.async_generation_ratio, infer) for infer in search.splits]
    best = min(candidates, key=lambda one: search.estimate(one).step_s, default=_Candidate(0.0, gpus // 2))
    return best.infer_gpus


def _search_neighbours(search: _Search, alphas: Sequence[float]) -> None:
    """Move from the best split so far to better neighbours, until there is none or enough were simulated."""
    while True:
        split = [candidate for candidate in search.options if candidate.infer_gpus]
        if not split:
            return
        best = max(split, key=lambda candidate: search.options[candidate].tokens_per_s)
        before = len(search.options)
        for neighbour in search.neighbours(best, alphas):
            search.simulate(neighbour)
        if len(search.options) == before:
            return


def _check_request(scenario: Scenario, gpus: int, alphas: Sequence[float], trainer_gpus: int) -> None:
    engine = scenario.simulation.engine.gpus
    if gpus < max(engine, trainer_gpus) or gpus % trainer_gpus:
        hint = f"one engine takes {engine}, one copy of the trainer {trainer_gpus}"
        raise ConfigError("cannot hold the synchronous run", key="--gpus", value=gpus, hint=hint)
    for alpha in alphas:
        if alpha < 0:
            raise ConfigError("must not be negative", key="--alpha", value=alpha)


def _make_option(full: Scenario, report: RunReport, estimated_s: float, scale: int, finished: bool) -> GpuSplitOption:
    speed, ends, pool = report.throughput, report.ends, report.usage.pool
    seconds = speed.step_mean_s if finished else float("inf")
    samples = full.settings.groups_per_step * full.settings.group_size
    measured = speed.steps[-report.window.steps :] if report.window.steps else ()
    length = sum(step.actions for step in measured) / max(sum(step.samples for step in measured), 1)
    actions = length * samples
    train_s = estimate_train_s(full, actions, samples, full.settings.groups_per_step)
    ended = max(ends.trained + ends.dropped, 1)
    slots = full.engines / scale * full.simulation.engine.slots
    return GpuSplitOption(
        alpha=full.settings.async_generation_ratio,
        train_gpus=len(full.train_devices),
        infer_gpus=len(full.infer_devices),
        colocated=full.settings.hybrid_engine,
        seconds_per_step=seconds,
        estimated_s=estimated_s,
        lag_mean=report.lag.mean,
        train_busy=min(train_s / seconds, 1.0) if seconds else 0.0,
        generate_busy=pool.busy if pool else 0.0,
        slots_filled=min(pool.concurrency / slots, 1.0) if pool else 0.0,
        stale_share=sum(ends.drops.get(reason, 0) for reason in _STALE_REASONS) / ended,
        drop_share=ends.dropped / ended,
        tokens_per_s=actions / seconds if seconds else 0.0,
        trained_length=length,
        finished=finished,
    )


# -- the recommendation, in words

_WORTHWHILE_SPEED_UP = 1.03
"""A smaller speed-up does not pay for training on older samples."""
_EQUAL_SPEED = 1.02
"""Options within this factor are equally fast; the fresher one is better."""


def recommend_split(plan: GpuSplitPlan) -> str:
    """Return one or two sentences that name the best option and the reason."""
    best, sync = plan.best_asynchronous, plan.synchronous
    if best is None:
        why = f", and train refuses it: {sync.refused}" if sync.refused else ""
        return f"Synchronous on all {plan.gpus} GPUs is the only way here: they cannot be split into two pools{why}."
    gain = plan.speed_up(best)
    why = "; ".join(_explain_split(plan, best))
    if gain < 1 and not sync.refused:
        loss = f"{best.name}, the best split, takes {best.seconds_per_step:.4g} s a step"
        return f"Synchronous on all {plan.gpus} GPUs wins here: {sync.seconds_per_step:.4g} s; {loss}. Why: {why}."
    if gain < _WORTHWHILE_SPEED_UP and not sync.refused:
        return (
            f"Stay synchronous on all {plan.gpus} GPUs: {best.name} is only {gain - 1:.1%} faster, "
            f"which does not pay for older samples. Why: {why}."
        )
    chosen = _choose_freshest_split(plan, best)
    speed = f"{chosen.tokens_per_s:,.0f} trained tokens/s ({chosen.seconds_per_step:.4g} s a step)"
    text = f"Take {chosen.name}: {speed}, {plan.speed_up(chosen):.2f}× the synchronous run"
    if chosen is not best:
        text += f"; {best.name} is less than {_EQUAL_SPEED - 1:.0%} faster and older"
    return text + "."


def _choose_freshest_split(plan: GpuSplitPlan, best: GpuSplitOption) -> GpuSplitOption:
    """Return the option with the smallest lag among those about as fast as the best."""
    close = [o for o in plan.options if not o.colocated and o.tokens_per_s * _EQUAL_SPEED >= best.tokens_per_s]
    return min(close, key=lambda option: (option.alpha, option.lag_mean))


def _explain_split(plan: GpuSplitPlan, best: GpuSplitOption) -> list[str]:
    """Return what holds the best split back."""
    parts, found = plan.estimate, []
    trains, generates = best.train_busy, best.generate_busy * best.slots_filled
    if best.stale_share > 0.05:
        found.append(f"{best.stale_share:.0%} of the samples became too old and were dropped")
    if trains > 0.85:
        found.append(
            f"training cannot shrink: {best.train_gpus} of {plan.gpus} GPUs do what all of them do in "
            f"{parts.train_s:.4g} s, and the engines idle meanwhile"
        )
    elif trains < 0.6:
        found.append(f"the pools idle: {best.train_gpus} training GPUs work only {trains:.0%} of the time")
    if parts.update_s > 0.1 * best.seconds_per_step:
        found.append(f"every weight update takes {parts.update_s:.4g} s")
    if parts.tail_s < 0.5 * parts.generate_s or parts.tail_s < 0.1 * plan.synchronous.seconds_per_step:
        found.append(f"the longest answer takes only {parts.tail_s:.4g} s, so a synchronous run waits little")
    if generates < 0.5 and trains <= 0.85:
        found.append(f"the engines' slots are {best.slots_filled:.0%} full")
    return found or ["the split leaves each pool waiting for the other"]
