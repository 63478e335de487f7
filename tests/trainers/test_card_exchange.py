"""Ranks that read each other's memory gather and reduce what a library would; here it is memory of the host."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from headway.errors import TransferError
from headway.trainers.sharded.card_exchange import CardExchange
from headway.trainers.sharded.staged_collectives import gather_rows
from headway.weights.device_memory import HostMemory

RANKS = 3


def make_numbers(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def work(rank: int, folder: str, told: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    group: Any = dist.group.WORLD
    exchange = CardExchange(HostMemory(), group, size=4096)  # so small that everything goes in parts
    wrong = [] if exchange.is_open else ["not open"]
    for turn, size in enumerate((1, 7, 3000, 10_001)):
        dtype = (torch.bfloat16, torch.float32)[turn % 2]
        sent = [make_numbers(10 * turn + other, RANKS * size, dtype) for other in range(RANKS)]
        gathered, mine = torch.empty(RANKS * RANKS * size, dtype=dtype), torch.empty(size, dtype=dtype)
        exchange.all_gather(gathered, sent[rank])
        exchange.reduce_scatter(mine, sent[rank])
        if not torch.equal(gathered, torch.cat(sent)):
            wrong.append(f"gathered {size}")
        if not torch.equal(mine, torch.stack(sent).view(RANKS, RANKS, size)[:, rank].sum(0)):
            wrong.append(f"reduced {size}")
    for rows in (1, 4, 9):
        whole = make_numbers(rows, rows * 5, torch.float32).view(rows, 5)
        chunks = [*whole.chunk(RANKS), *[whole[:0]] * RANKS]
        if not torch.equal(gather_rows(exchange, chunks[rank], whole.shape, RANKS), whole):
            wrong.append(f"{rows} rows")
    closed = CardExchange(UnreadableMemory() if rank == 1 else HostMemory(), group)
    told.put((rank, wrong, closed.is_open))


class UnreadableMemory(HostMemory):
    """Memory of a process that cannot open that of others."""

    def open(self, handle: tuple[Any, ...]) -> Tensor:
        raise TransferError("on another card")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_ranks_gather_and_add_through_memory_that_all_can_read(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    processes = [context.Process(target=work, args=(rank, str(tmp_path), told), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()
    found = sorted(told.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(20)
    assert found == [(rank, [], False) for rank in range(RANKS)], "one rank that cannot read is enough to use the host"
