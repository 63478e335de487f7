"""A trainer and its critic, each in a process of its own, and both in one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.trainers.local.critic_learner import LocalCritic
from headway.trainers.local.local_trainer import LocalTrainer

from .factory import tiny
from .sharded_targets import settings_of, store

ARGS = {"critic": True, "mini": 4, "tokens": 40}


def make_both(args: Mapping[str, Any] = ARGS) -> LocalTrainer:
    return LocalTrainer(tiny, settings_of(args), store({}))


def make_trainer(args: Mapping[str, Any]) -> LocalTrainer:
    settings = replace(settings_of(args), critic=None, critic_elsewhere=True)
    return LocalTrainer(tiny, settings, store({}))


def make_critic(args: Mapping[str, Any]) -> LocalCritic:
    return LocalCritic(tiny(), settings_of(args))
