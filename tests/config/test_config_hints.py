"""Whoever writes a name of another place, or of TRL's, is told the key that there is."""

from __future__ import annotations

import re

import pytest

from headway.config.dialect_tables import TRL_NAMES
from headway.config.field_types import iterate_options
from headway.config.schema import Config

from .factory import only_problem

KEYS = {option.key for option in iterate_options(Config)}


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("num_generations", "TRL's num_generations is num_return_sequences_in_group here"),
        ("beta", "TRL's beta is kl_loss_coef, with use_kl_loss=true here"),
        ("lora_rank", "did you mean actor_train.model_args.lora_rank?"),
        ("temperature", "did you mean actor_infer.generating_args.temperature?"),
        ("actor_train.learning_rate", "did you mean actor_train.training_args.learning_rate?"),
        ("validation.temperature", "did you mean validation.generating_args.temperature?"),
        ("asnyc_generation_ratio", "did you mean async_generation_ratio?"),
    ],
)
def test_a_name_from_elsewhere_is_answered_with_the_key(written: str, hint: str) -> None:
    assert hint in str(only_problem({written: 8}))


@pytest.mark.parametrize("name", TRL_NAMES)
def test_what_a_name_of_trl_is_here_exists_and_the_name_does_not(name: str) -> None:
    said = re.findall(r"[a-z_]+(?:\.[a-z_<>]+)+|[a-z]+(?:_[a-z]+)+|pretrain|resume", TRL_NAMES[name])
    assert said and set(said) <= KEYS, said
    assert name not in KEYS
