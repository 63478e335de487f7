"""Shards of a tensor land where the whole tensor has them, whatever dimensions are cut."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from headway.trainers.sharded import shared_file


@pytest.mark.parametrize("shape", [(7,), (5, 4), (4, 3, 6), (3, 4, 2, 5)])
def test_runs_of_all_shards_are_the_whole_tensor(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for cuts in product(*([[(0, size)], [(0, 1), (1, size)]] for size in shape)):
        written = torch.full((whole.numel(),), -1)
        for ranges in product(*cuts):
            shard = whole[tuple(slice(*one) for one in ranges)]
            length, places = shared_file._find_runs(shape, shard.shape, [first for first, _ in ranges])
            for run, place in zip(shard.reshape(-1, length), places, strict=True):
                assert bool((written[place : place + length] == -1).all())
                written[place : place + length] = run
        assert torch.equal(written, whole.flatten())


def test_a_file_of_one_rank_is_read_by_the_library(tmp_path: Path) -> None:
    tensors = {
        "step": torch.tensor(3.0),
        "b/moment": torch.randn(5, 3).bfloat16(),
        "a": torch.randn(2, 2, dtype=torch.float64),
        "codes": torch.arange(7, dtype=torch.uint8),
        "empty": torch.zeros(0, 4),
    }
    path = tmp_path / "file.safetensors"
    shared_file.begin_file(tensors, path)
    shared_file.write_shards(tensors, path, is_first=True)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], one) and found[name].dtype == one.dtype for name, one in tensors.items())
