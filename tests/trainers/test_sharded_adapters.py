"""Weights with adapters that are put together from pieces are those that one process merges, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headway.errors import ConfigError
from headway.trainers.local.policy_model import PolicyModel
from headway.trainers.local.settings import LocalSettings, LoraSettings
from headway.trainers.local.token_batch import TokenRow
from headway.trainers.local.tree_packing import pack_rows
from headway.trainers.sharded.sharded_model import ShardedPolicy, ShardingMeshes

from .factory import exact, tiny
from .test_families import made

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A single rank: it holds all pieces, and gathers them as many would."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def settings(*targets: str) -> LocalSettings:
    return LocalSettings(lora=LoraSettings(rank=2, targets=targets), gradient_checkpointing=False)


def moved(policy: PolicyModel) -> PolicyModel:
    """With adapters that say something."""
    with torch.no_grad():
        for number, one in enumerate(policy.trainable().values()):
            one.add_(0.01 * (1 + number % 7))
    return policy


@pytest.mark.parametrize(
    ("make", "targets"),
    [
        pytest.param(tiny, (), id="linear"),
        pytest.param(exact, (), id="transposed"),
        pytest.param(lambda: made("olmoe"), ("q_proj", "v_proj"), id="beside-experts"),
    ],
)
def test_pieces_make_the_weights_that_one_process_has(
    mesh: DeviceMesh, make: Callable[[], Any], targets: tuple[str, ...]
) -> None:
    cut = ShardingMeshes(shard=mesh, tensor=None, context=None)
    ours, theirs = (
        moved(policy)
        for policy in (ShardedPolicy(make(), settings(*targets), cut), PolicyModel(make(), settings(*targets)))
    )
    found, wanted = ours.weights(), theirs.weights()
    assert found.keys() == wanted.keys() == {name for name in wanted if "base_layer" not in name}
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    row = TokenRow(sample_id="x", group=0, tokens=(1, 7, 3, 11, 5, 2), actions=(2, 3, 4, 5), first=0)
    pack = pack_rows([row], budget=100)[0]
    with torch.no_grad():
        assert ours.logps(pack).logp_N.tolist() == pytest.approx(theirs.logps(pack).logp_N.tolist(), abs=1e-4)


@pytest.mark.parametrize("targets", [(), ("embed_tokens", "q_proj")])
def test_adapters_that_cannot_be_cut_are_refused(mesh: DeviceMesh, targets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"lora_target.*cannot be cut over ranks"):
        ShardedPolicy(made("olmoe"), settings(*targets), ShardingMeshes(shard=mesh, tensor=None, context=None))
