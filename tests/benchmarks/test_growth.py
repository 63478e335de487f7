"""What the growth benchmark computes beforehand is what models really hold."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from benchmarks.growth.computed import Shape, engine_mb, trainer_mb
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from headway.engines.native.kv_cache import RowKvCache, read_kv_shape
from headway.engines.native.served_linear import choose_fastest_layout
from headway.engines.native.served_parameters import ServedParameters
from headway.trainers.local.local_learner import LocalLearner
from headway.trainers.local.policy_model import compute_hidden_states
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.token_batch import TokenRow
from headway.trainers.local.tree_packing import TokenPack, pack_rows

VOCABULARY, HIDDEN, INTERMEDIATE = 97, 192, 512
PROMPT, ANSWER, MEMBERS, GROUPS = 16, 28, 4, 3
TREE = PROMPT + MEMBERS * ANSWER


def make_model(layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def make_pack() -> TokenPack:
    """Groups with a common prompt, all in one pack."""
    chance, rows = random.Random(0), list[TokenRow]()
    for group in range(GROUPS):
        prompt = [chance.randrange(VOCABULARY) for _ in range(PROMPT)]
        for _ in range(MEMBERS):
            tokens = (*prompt, *(chance.randrange(VOCABULARY) for _ in range(ANSWER)))
            actions = tuple(range(PROMPT, PROMPT + ANSWER))
            rows.append(TokenRow(sample_id="", group=group, tokens=tokens, actions=actions, first=len(rows) * ANSWER))
    (pack,) = pack_rows(rows, budget=10_000)
    return pack


def kept_bytes(layers: int, pack: TokenPack) -> int:
    """What autograd keeps of a forward pass, weights not counted."""
    policy = LocalLearner(make_model(layers), LocalSettings(gradient_checkpointing=False)).policy
    weights = {one.untyped_storage().data_ptr() for one in policy.causal.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute_hidden_states(policy.backbone, pack)
    return sum(one.untyped_storage().nbytes() for place, one in kept.items() if place not in weights)


def test_activations_of_a_layer_are_those_that_autograd_keeps() -> None:
    pack = make_pack()
    assert pack.token_L.numel() == GROUPS * TREE
    found = (kept_bytes(4, pack) - kept_bytes(2, pack)) / 2 / 4 / pack.token_L.numel()
    assert found == pytest.approx(Shape.of(make_model()).layer_floats(TREE), rel=0.01)


def test_a_trainer_holds_weights_gradients_and_two_moments_and_recomputing_keeps_little() -> None:
    shape = Shape.of(make_model(layers=12))
    trainer = {
        recomputing: trainer_mb(shape, pack_tokens=1000, tree_tokens=100, checkpointing=recomputing, versions=3)
        for recomputing in (True, False)
    }
    learner = LocalLearner(make_model(layers=12), LocalSettings())
    held = sum(one.nbytes for one in learner.state.optimizer.all_tensors().values() if one.ndim)
    assert trainer[True]["weights"] + trainer[True]["optimizer"] == pytest.approx(held / 1e6)
    assert trainer[True]["activations"] < 0.3 * trainer[False]["activations"]


def test_an_engine_holds_served_weights_twice_and_the_slots() -> None:
    model = make_model()
    shape = Shape.of(model)
    kv = RowKvCache(**read_kv_shape(model.config, 50), slots=4, slot_tokens=50, dtype=torch.float32)
    tensors = dict(model.named_parameters())
    parameters = ServedParameters(make_model(), choose_fastest_layout(torch.float32), torch.float32)
    served = {id(one): one.numel() * 4 for each in parameters.prepare(tensors).values() for one in each}
    computed = engine_mb(shape, slots=4, slot_tokens=50, prefix_tokens=0, bucket_mb=128)
    assert computed["weights"] == computed["spare weights"] == pytest.approx(sum(served.values()) / 1e6)
    assert computed["KV"] == pytest.approx(sum(one.nbytes for one in (*kv.keys, *kv.values)) / 1e6)
