"""What a plan means, in words: which option to take, and why asynchrony loses where it does."""

from __future__ import annotations

from headway.sim.planner import Option, Plan

_WORTH = 1.03
"""A speed-up below this does not pay for training on older samples."""
_CLOSE = 1.02
"""Options this close in time are equally fast; the fresher one is better."""


def verdict(plan: Plan) -> str:
    """One or two sentences that name the winner and the reason."""
    best, sync = plan.best_asynchronous, plan.synchronous
    if best is None:
        return f"Synchronous on all {plan.gpus} GPUs is the only way here: they cannot be split into two pools."
    gain = plan.speed_up(best)
    why = "; ".join(reasons(plan, best))
    if gain < 1:
        loss = f"{best.name}, the best split, takes {best.seconds_per_step:.4g} s a step"
        return f"Synchronous on all {plan.gpus} GPUs wins here: {sync.seconds_per_step:.4g} s; {loss}. Why: {why}."
    if gain < _WORTH:
        return (
            f"Stay synchronous on all {plan.gpus} GPUs: {best.name} is only {gain - 1:.1%} faster, "
            f"which does not pay for older samples. Why: {why}."
        )
    chosen = freshest(plan, best)
    text = (
        f"Take {chosen.name}: {chosen.seconds_per_step:.4g} s a step, {plan.speed_up(chosen):.2f}× the synchronous run"
    )
    if chosen is not best:
        text += f"; {best.name} is less than {_CLOSE - 1:.0%} faster and older"
    return text + "."


def freshest(plan: Plan, best: Option) -> Option:
    """Of the options about as fast as the best, the one with the smallest lag."""
    close = [o for o in plan.options if not o.colocated and o.seconds_per_step <= best.seconds_per_step * _CLOSE]
    return min(close, key=lambda option: (option.alpha, option.lag_mean))


def reasons(plan: Plan, best: Option) -> list[str]:
    """What holds the best split back, the heaviest first where that can be told."""
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
