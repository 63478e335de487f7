"""Names of `lora_target` are compared with the layers of the model before anything starts."""

import pytest

from headway.config import load_config
from headway.errors import ConfigError
from headway.models.model_checks import check_adapter_targets

LAYERS = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "lm_head"]


@pytest.mark.parametrize("targets", [(), ("q_proj",), ("mlp.up_proj", "q_proj")])
def test_names_that_layers_have_are_accepted(targets: tuple[str, ...]) -> None:
    check_adapter_targets(targets, LAYERS, "lm_head")


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("q_prj",), "no layer q_prj, did you mean 'q_proj'?"),
        (("q_proj", "nothing"), "no layer nothing"),
        (("proj",), "no layer proj"),
        (("lm_head",), "lm_head is the head, which has no adapters"),
    ],
)
def test_others_are_refused_with_the_names_that_there_are(targets: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match="lora_target") as refused:
        check_adapter_targets(targets, LAYERS, "lm_head")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("written", "targets"),
    [
        ("all-linear", ()),
        (["all-linear"], ()),
        ("q_proj, v_proj", ("q_proj", "v_proj")),
        (["q_proj", "v_proj"], ("q_proj", "v_proj")),
    ],
)
def test_a_list_and_a_text_with_commas_mean_the_same(written: object, targets: tuple[str, ...]) -> None:
    given = {"actor_train": {"model_args": {"lora_rank": 4, "lora_target": written}}}
    assert load_config(given).config.actor_train.model_args.lora_target == targets
