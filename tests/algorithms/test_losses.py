"""Each policy loss against its formula written out by hand, its gradient against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log

import pytest
import torch
from torch import Tensor

from headway.algorithm_traits import ADVANTAGE_TRAITS, LOSS_TRAITS, LossTraits, register_policy_loss
from headway.algorithms import advantages as advantages  # registers the built-in ones
from headway.algorithms.actions import Actions
from headway.algorithms.losses import ActionLoss, LossSettings, compute_action_loss
from headway.errors import ConfigError, InvariantBroken
from headway.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from tests.algorithms.factory import INDEPENDENT_LOSSES, LOSS_NAMES, bits, gradient, objective, reals, whole, world

RATIOS = (0.3, 0.85, 1.0, 1.15, 1.9, 4.0)
CASES = [(ratio, advantage) for ratio in RATIOS for advantage in (2.0, -1.5, 0.0)]
BASE = -1.2
LOGP = reals(*(BASE + log(ratio) for ratio, _ in CASES))
BEHAVIOUR = torch.full_like(LOGP, BASE)
ADVANTAGE = reals(*(advantage for _, advantage in CASES))


def by_hand(rule: Callable[[float, float], float]) -> Tensor:
    """`rule(ratio, advantage)` for each case."""
    return reals(*(rule(ratio, advantage) for ratio, advantage in CASES))


def run(
    name: str,
    settings: LossSettings | None = None,
    *,
    logp: Tensor = LOGP,
    behaviour: Tensor = BEHAVIOUR,
    advantage: Tensor = ADVANTAGE,
    sequence: Tensor | None = None,
    **more: Tensor,
) -> ActionLoss:
    """Call the loss `name` on one sequence per action, unless `sequence` says otherwise."""
    sequence = torch.arange(len(logp)) if sequence is None else sequence
    more.setdefault("mask_N", torch.ones(len(logp), dtype=torch.bool))
    actions = Actions(
        logp_N=logp,
        behaviour_N=behaviour,
        advantage_N=advantage,
        sequence_N=sequence,
        sequences=int(sequence.max()) + 1,
        **more,
    )
    return compute_action_loss(name, actions, settings or LossSettings())


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_ppo_is_the_clipped_surrogate() -> None:
    made = run("ppo", LossSettings(clip_low=0.1, clip_high=0.3))
    close(made.loss_N, by_hand(lambda r, a: -min(r * a, clip(r, 0.9, 1.3) * a)))
    expected = [(a > 0 and r > 1.3) or (a < 0 and r < 0.9) for r, a in CASES]
    assert made.clipped_N.tolist() == expected


def test_the_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    made = run("ppo", LossSettings(dual_clip=3.0))

    def rule(r: float, a: float) -> float:
        gain = min(r * a, clip(r, 0.8, 1.2) * a)
        return -max(gain, 3.0 * a) if a < 0 else -gain

    close(made.loss_N, by_hand(rule))
    assert made.clipped_N[CASES.index((4.0, -1.5))]


@pytest.mark.parametrize("cap", [1.5, 5.0])
def test_decoupled_ppo_clips_on_the_proximal_ratio_and_weighs_by_the_behaviour(cap: float) -> None:
    proximal = BEHAVIOUR + 0.6
    made = run("decoupled_ppo", LossSettings(decoupled_weight_cap=cap), proximal_N=proximal)

    def rule(r: float, a: float) -> float:
        inner = r / exp(0.6)
        return -min(inner * a, clip(inner, 0.8, 1.2) * a) * min(exp(0.6), cap)

    close(made.loss_N, by_hand(rule))


def test_vanilla_is_the_log_probability_times_the_advantage() -> None:
    close(run("vanilla").loss_N, -ADVANTAGE * LOGP)


def test_tis_truncates_the_weight() -> None:
    made = run("tis", LossSettings(tis_lower=0.5, tis_upper=2.0))
    close(made.loss_N, by_hand(lambda r, a: -clip(r, 0.5, 2.0) * a) * LOGP)
    assert made.clipped_N.tolist() == [not 0.5 <= r <= 2.0 for r, _ in CASES]


def test_sao_leaves_out_what_leaves_its_range_on_either_side_and_clips_nothing() -> None:
    made = run("sao", LossSettings(sao_epsilon_low=0.2, sao_epsilon_high=1.0))
    close(made.loss_N, by_hand(lambda r, a: -r * a if 0.8 <= r <= 2.0 else 0.0) * LOGP)
    assert made.clipped_N.tolist() == [not 0.8 <= r <= 2.0 for r, _ in CASES]


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    made = run("cispo", LossSettings(cispo_epsilon_low=0.2, cispo_epsilon_high=0.1))
    close(made.loss_N, by_hand(lambda r, a: -clip(r, 0.8, 1.1) * a) * LOGP)


def test_the_unified_mask_of_cispo_drops_what_ppo_would_clip() -> None:
    settings = LossSettings(cispo_epsilon_low=0.2, cispo_epsilon_high=0.2, cispo_unified_mask=True)
    made = run("cispo", settings)
    clipped = run("ppo").clipped_N
    assert clipped.any()
    assert (made.loss_N[clipped] == 0).all()
    plain = run("cispo", LossSettings(cispo_epsilon_low=0.2, cispo_epsilon_high=0.2))
    close(made.loss_N[~clipped], plain.loss_N[~clipped])


def test_topr_tapers_only_what_was_not_rewarded() -> None:
    reward = torch.arange(len(CASES)) % 2
    made = run("topr", LossSettings(topr_positive_weight=0.7, topr_negative_weight=1.3), reward_N=reward)
    weights = [0.7 if good else 1.3 * clip(r, 0, 1) for (r, _), good in zip(CASES, reward.tolist(), strict=True)]
    close(made.loss_N, -reals(*weights) * ADVANTAGE * LOGP)


def test_kimi15_pulls_towards_the_behaviour_policy() -> None:
    made = run("kimi15", LossSettings(kimi15_tau=0.4))
    close(made.loss_N, -ADVANTAGE * LOGP + by_hand(lambda r, a: 0.2 * log(r) ** 2))


def covariances(mask: Tensor) -> list[float]:
    """(A − mean A)·(ℓ − mean ℓ) of each case, with the means of those inside `mask`."""
    mean_a, mean_l = (float(x[mask].mean()) for x in (ADVANTAGE, LOGP))
    return [(a - mean_a) * (x - mean_l) for a, x in zip(ADVANTAGE.tolist(), LOGP.tolist(), strict=True)]


def test_kl_cov_pulls_back_the_actions_with_the_largest_covariance() -> None:
    mask = torch.ones(len(CASES), dtype=torch.bool)
    mask[[0, -1]] = False
    made = run("kl_cov", LossSettings(kl_cov_ratio=0.2, kl_cov_coef=0.5), mask_N=mask)
    ranked = sorted((i for i in range(len(CASES)) if mask[i]), key=lambda i: -covariances(mask)[i])
    pulled = set(ranked[:3])  # 0.2 · 16, rounded down
    expected = [-r * a + (0.5 * abs(log(r)) if i in pulled else 0.0) for i, (r, a) in enumerate(CASES)]
    close(made.loss_N, reals(*expected))
    assert {i for i, on in enumerate(made.clipped_N.tolist()) if on} == pulled
    few = run("kl_cov", LossSettings(kl_cov_ratio=1e-6), mask_N=mask)
    assert int(few.clipped_N.sum()) == 1, "at least one"


def test_clip_cov_leaves_actions_out_whose_covariance_is_inside_its_bounds() -> None:
    everything = torch.ones(len(CASES), dtype=torch.bool)
    plain = run("ppo")
    inside = {
        i for i, x in enumerate(covariances(everything)) if 0.1 < x < 2.0 and not plain.clipped_N[i]
    }  # what PPO clips is not left out once more
    settings = LossSettings(clip_cov_ratio=0.12, clip_cov_low=0.1, clip_cov_high=2.0)
    first, again = run("clip_cov", settings), run("clip_cov", settings)
    dropped = {i for i in range(len(CASES)) if first.clipped_N[i] and not plain.clipped_N[i]}
    assert len(inside) > 2
    assert len(dropped) == 2
    assert dropped < inside
    close(first.loss_N, torch.where(first.clipped_N & ~plain.clipped_N, torch.zeros_like(LOGP), plain.loss_N))
    assert torch.equal(first.clipped_N, again.clipped_N), "the draw is the same after a restart"
    close(run("clip_cov", LossSettings(clip_cov_low=90, clip_cov_high=99)).loss_N, plain.loss_N)


def test_cppo_leaves_an_action_out_when_those_before_it_have_used_the_budget() -> None:
    """The rule of the paper, one action after the other, for two sequences of which one has a masked action."""
    sequences, mask = [0] * 9 + [1] * 7, bits("1111111110111111")
    logp = reals(*(-0.3 - 0.11 * ((5 * i) % 7) for i in range(16)))
    behaviour = reals(*(-0.3 - 0.11 * ((3 * i) % 7) for i in range(16)))
    advantage = reals(*(1.0 if i % 3 else -2.0 for i in range(16)))
    settings = LossSettings(clip_high=0.12, dual_clip=1.3, cppo_length=12, cppo_weight_min=0.5, cppo_budget=0.01)
    expected, left_out = [], []
    for which in (0, 1):
        places = [i for i in range(16) if sequences[i] == which and mask[i]]
        moved = {i: abs(exp(logp[i]) - exp(behaviour[i])) for i in places}
        typical = float(torch.quantile(reals(*moved.values()), 0.9))
        budget, spent, weights = clip(typical, 0.01, 0.05), 0.0, 0.0
        for position, i in enumerate(places, start=1):
            weight = 0.5 + 0.5 * (12 - position) / 11
            limit = min(0.12, 0.12 + budget * weights - spent)
            ratio = exp(logp[i] - behaviour[i])
            if advantage[i] * (ratio - 1) > 0 and weight * moved[i] > limit:
                left_out.append((i, moved[i] <= 0.12))
            expected.append(0.0 if left_out and left_out[-1][0] == i else -min(ratio, 1.3) * advantage[i] * logp[i])
            spent, weights = spent + weight * moved[i], weights + weight
    made = run("cppo", settings, logp=logp, behaviour=behaviour, advantage=advantage,
               sequence=torch.tensor(sequences), mask_N=mask)  # fmt: skip
    close(made.loss_N[mask], reals(*expected))
    assert {near for _, near in left_out} == {True, False}, "some for themselves, some for those before them"


@pytest.mark.parametrize("level", ["sequence", "none"])
def test_decoupled_ppo_weighs_whole_sequences_or_nothing(level: str) -> None:
    logp, proximal = reals(-1.0, -2.0, -0.5), reals(-1.1, -1.9, -0.7)
    behaviour, advantage = reals(-1.4, -1.8, -0.8), reals(1.0, 1.0, -2.0)
    settings = LossSettings(decoupled_weight_type=level, decoupled_weight_cap=2.0)  # type: ignore[arg-type]
    ids, more = whole(0, 0, 1), {"behaviour": behaviour, "advantage": advantage, "proximal_N": proximal}
    made = run("decoupled_ppo", settings, logp=logp, sequence=ids, **more)
    weights = (exp(0.3 - 0.1), exp(0.3 - 0.1), exp(0.1)) if level == "sequence" else (1.0, 1.0, 1.0)
    ratios = (exp(0.1), exp(-0.1), exp(0.2))
    expected = [
        -min(r * a, clip(r, 0.8, 1.2) * a) * w for r, a, w in zip(ratios, (1.0, 1.0, -2.0), weights, strict=True)
    ]
    close(made.loss_N, reals(*expected))


def test_gspo_gives_every_action_the_ratio_of_its_sequence() -> None:
    logp, behaviour = reals(-1.0, -2.0, -9.0, -0.5), reals(-1.1, -1.7, -1.0, -0.8)
    advantage = reals(1.0, 1.0, 1.0, -2.0)
    settings = LossSettings(clip_low=0.05, clip_high=0.05)
    made = run(
        "gspo", settings, logp=logp, behaviour=behaviour, advantage=advantage,
        sequence=whole(0, 0, 0, 1), mask_N=bits("1101"),
    )  # fmt: skip
    first, second = exp((0.1 - 0.3) / 2), exp(0.3)
    close(made.loss_N[:2], -torch.full((2,), first, dtype=torch.float64))
    close(made.loss_N[3], torch.tensor(2.0 * second, dtype=torch.float64))
    assert made.clipped_N.tolist() == [False, False, False, False]


@pytest.mark.parametrize("name", INDEPENDENT_LOSSES)
def test_gradients_agree_with_the_derivative_written_out(name: str) -> None:
    """Stop-gradients make finite differences of the loss itself wrong, so the weight is differentiated by hand."""
    logp = LOGP.clone().requires_grad_()
    proximal, reward = BEHAVIOUR + 0.1, torch.arange(len(CASES)) % 2
    low, high = LOSS_TRAITS.get(name).default_clip or (0.2, 0.2)
    made = run(name, LossSettings(clip_low=low, clip_high=high), logp=logp, proximal_N=proximal, reward_N=reward)

    def surrogate(r: float, a: float, low: float, high: float) -> float:
        return 0.0 if (a > 0 and r > high) or (a < 0 and r < low) else -r * a

    def gate(r: float, a: float) -> float:
        return 1 / (1 + exp((1.0 if a > 0 else 1.05) * (1 - r)))

    def binary_kl(r: float) -> float:
        then, other = exp(BASE), max(1 - r * exp(BASE), 0.0)
        return -then * log(r) + (1 - then) * log((1 - then + 1e-8) / (other + 1e-8))

    shift = exp(0.1)
    rules: dict[str, Callable[[float, float], float]] = {
        "ppo": lambda r, a: surrogate(r, a, 0.8, 1.2),
        "decoupled_ppo": lambda r, a: surrogate(r / shift, a, 0.8, 1.2) * shift,
        "vanilla": lambda r, a: -a,
        "up": lambda r, a: -a if a > 0 else surrogate(r, a, 0.8, 1.2),
        "tis": lambda r, a: -clip(r, 0, 1) * a,
        "cispo": lambda r, a: -clip(r, 0.9, 1.1) * a,
        "sao": lambda r, a: -r * a if 0.7 <= r <= 6.0 else 0.0,
        "topr": lambda r, a: -clip(r, 0, 1) * a,
        "kimi15": lambda r, a: -a + 0.1 * log(r),
        "gspo": lambda r, a: surrogate(r, a, 1 - 3e-4, 1 + 4e-4),
        "gmpo": lambda r, a: surrogate(r, a, exp(-0.4), exp(0.4)),
        "sapo": lambda r, a: -4 * a * r * gate(r, a) * (1 - gate(r, a)),
        "dppo_tv": lambda r, a: 0.0 if a * (r - 1) > 0 and abs(r - 1) * exp(BASE) > 0.15 else -r * a,
        "dppo_kl": lambda r, a: 0.0 if a * (r - 1) > 0 and binary_kl(r) > 0.05 else -r * a,
        "cppo": lambda r, a: 0.0 if a * (r - 1) > 0 and abs(r - 1) * exp(BASE) > 0.15 else -r * a,
    }
    expected = by_hand(rules[name])
    if name == "topr":
        expected = torch.where(reward > 0, -ADVANTAGE, expected)
    (found,) = torch.autograd.grad(made.loss_N.sum(), logp)
    close(found, expected)


def smooth(name: str, logp: Tensor) -> Tensor:
    """Losses without a stop-gradient around ℓ."""
    advantage, ids = ADVANTAGE[:6] + 0.3, whole(0, 0, 1, 1, 1, 2)
    behaviour = LOGP[:6].detach() - reals(0.05, -0.05, 0.02, 0.4, -0.4, 0.03)
    more = {"proximal_N": behaviour + 0.01}
    if name == "gspo":
        more = {"sequence": ids, "mask_N": bits("110111")}
    settings = LossSettings(dual_clip=3.0 if name == "ppo" else None)
    return run(name, settings, logp=logp, behaviour=behaviour, advantage=advantage, **more).loss_N


@pytest.mark.parametrize("name", ["ppo", "decoupled_ppo", "kimi15", "gspo"])
def test_smooth_losses_pass_finite_differences(name: str) -> None:
    assert torch.autograd.gradcheck(lambda logp: smooth(name, logp), (LOGP[:6].clone().requires_grad_(),))


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_other_policies_are_constants_for_the_gradient(name: str) -> None:
    place = world(2)
    others = [place.fixed[key].clone().requires_grad_() for key in ("behaviour_N", "proximal_N")]
    table = place.table.clone().requires_grad_()
    raw = place.actions(table, behaviour_N=others[0], proximal_N=others[1])
    made = compute_action_loss(name, raw, LossSettings())
    made.loss_N.sum().backward()  # type: ignore[no-untyped-call]
    assert [table.grad is None, *(other.grad is None for other in others)] == [False, True, True]


CORRECTED_ALIKE = ("vanilla", "ppo", "tis", "topr", "cispo", "kimi15")


@pytest.mark.parametrize("seed", range(5))
def test_against_recomputed_log_probs_the_correction_is_silently_off(seed: int) -> None:
    """Fact 1: with one step per batch r ≡ 1, and six losses have one gradient."""
    place = world(seed)
    now = place.actions(place.table).logp_N
    gradients = [gradient(objective(name), place, behaviour_N=now) for name in CORRECTED_ALIKE]
    assert gradients[0].abs().max() > 1e-3
    for other in gradients[1:]:
        close(other, gradients[0])


@pytest.mark.parametrize("seed", range(5))
def test_ahead_of_the_behaviour_policy_no_two_losses_agree(seed: int) -> None:
    """Fact 2: with a real lag and advantages of both signs every loss has a gradient of its own."""
    place = world(seed)
    assert place.fixed["advantage_N"].min() < 0 < place.fixed["advantage_N"].max()
    gradients = {name: gradient(objective(name), place) for name in INDEPENDENT_LOSSES}
    for name, one in gradients.items():
        for other_name, other in gradients.items():
            if name < other_name and not {"dppo_tv", "cppo", "sao"} & {name, other_name}:  # often leave out the same
                assert (one - other).abs().max() > 1e-3, f"{name} and {other_name} have the same gradient"


@pytest.mark.parametrize("name", LOSS_NAMES)
@pytest.mark.parametrize("gap", [30.0, 1e4, -30.0, -1e4])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_ratios_stay_finite(name: str, gap: float, sign: float) -> None:
    place = world(3)
    table = place.table.float().requires_grad_()
    start = place.actions(table)
    far = place.actions(
        table, behaviour_N=start.logp_N.detach() - gap, advantage_N=sign * place.fixed["advantage_N"].float()
    )
    result = objective(name)(far, place.totals())
    result.loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(result.loss)
    assert table.grad is not None
    assert torch.isfinite(table.grad).all()
    assert all(value == value and abs(value) < float("inf") for value in result.sums.summary().values())


def test_an_unknown_variant_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"pg_variant = 'pppo'.*one of ppo"):
        run("pppo")


@pytest.mark.parametrize(("name", "missing"), [("decoupled_ppo", "proximal_N"), ("topr", "reward_N")])
def test_a_loss_says_what_it_was_not_given(name: str, missing: str) -> None:
    place = world(0)
    with pytest.raises(InvariantBroken, match=f"{name} reads {missing}"):
        objective(name)(place.actions(place.table, **{missing: None}), place.totals())


def test_a_registered_loss_is_an_objective_like_any_other() -> None:
    def half_ppo(actions: Actions, settings: LossSettings) -> Tensor:
        return -0.5 * actions.advantage_N * (actions.logp_N - actions.behaviour_N).exp()

    register_policy_loss("half_ppo", half_ppo, LossTraits(corrects_off_policy=True, skips_zero_advantages=True))
    try:
        place = world(4)
        found = gradient(objective("half_ppo"), place)
        assert found.abs().max() > 1e-6
        assert objective("half_ppo").skips_zero_advantages
        assert not objective("half_ppo").needs_whole_sequences
    finally:
        LOSS_TRAITS.unregister("half_ppo")
        POLICY_LOSSES.unregister("half_ppo")


def test_every_built_in_name_has_a_function_and_traits() -> None:
    for built_in, traits in ((POLICY_LOSSES, LOSS_TRAITS), (ADVANTAGE_ESTIMATORS, ADVANTAGE_TRAITS)):
        assert set(built_in.built_in) <= set(traits.names())
        assert all(callable(built_in.get(name)) for name in built_in.built_in)
