"""Broadcasts over NCCL on one GPU: a group of one rank, an engine that never comes, and a second rank on the card."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from headway.errors import TransferError
from headway.weights.base import compute_checksum
from headway.weights.broadcast_transport import (
    BroadcastInbox,
    BroadcastTransport,
    ReceivedDeviceSlice,
    _attempt_within,
    _broadcast_data,
    _make_group,
)
from headway.weights.weight_receiver import DoubleBufferedReceiver
from headway.weights.weight_store import SharedArena

from .test_local_weights import Serving, published

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

HERE, DEVICE = "127.0.0.1", "cuda:0"


def store() -> TCPStore:
    return TCPStore(HERE, 0, is_master=True, wait_for_workers=False)


def test_one_rank_broadcasts_over_nccl() -> None:
    limit = timedelta(seconds=30)
    group = _make_group("nccl", store(), 0, 0, 1, limit, DEVICE)
    data = torch.arange(1 << 22, dtype=torch.int32, device=DEVICE).view(torch.uint8)
    wanted = compute_checksum(data.cpu().numpy())
    for _ in range(3):
        _broadcast_data(group, data, limit)
    assert ReceivedDeviceSlice(data).checksum() == wanted


def test_a_rank_that_never_comes_ends_the_forming_of_a_group_within_its_deadline() -> None:
    began_s, limit = time.monotonic(), timedelta(seconds=3)
    failure = _attempt_within(limit, _make_group, "nccl", store(), 0, 0, 2, limit, DEVICE)
    assert failure and time.monotonic() - began_s < 6


def test_two_ranks_on_one_card_are_refused_in_time_with_the_name_of_the_engine() -> None:
    async def scenario() -> None:
        source, transport = (
            published(wire_dtype=None, arena=SharedArena()),
            BroadcastTransport(timeout_s=15, backend="nccl", device=DEVICE),
        )
        inbox = BroadcastInbox("engine/0", HERE, transport.port, device=DEVICE)
        receiver = DoubleBufferedReceiver(Serving().switch, device=DEVICE, open_payload=inbox.open)
        transport.admit(receiver, "engine/0")
        _, buckets = await source.gather(2)
        began_s = time.monotonic()
        with pytest.raises(TransferError, match=r"engine/0: rank 1 of 2 .* while the group is formed") as refused:
            await transport.send(await anext(buckets), receiver)
        print(refused.value)
        assert time.monotonic() - began_s < 25
        source.close()

    asyncio.run(scenario())
