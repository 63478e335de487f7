"""The mathematics of post-training on packed tensors: losses, corrections, aggregation, KL, advantages, log-probs.

    settings = make_advantage_settings(resolved)
    advantages = estimate_advantages(reward_batch, settings, kl_coef=controller.coef)    # once per batch
    totals = BatchTotals.of(advantages.mask_N, sequence_N, sequences)                    # once per optimizer step
    result = make_objective(resolved)(actions, totals)                                   # for each micro-batch
    result.loss.backward()

The package needs torch and nothing else. It knows no model, no device and no process; the trainers do.
"""
