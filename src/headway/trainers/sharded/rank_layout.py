"""How ranks share a training step: who has which samples, which part of a sequence, and which part of a layer.

A rank has three numbers: its share of the packs (data), its part of every sequence (context), its part of every layer
(tensor). Neighbours share layers, then sequences, as those exchange most. Weights, gradients and moments are cut over
data × context. Knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headway.errors import ConfigError


class RankCoordinates(NamedTuple):
    """The numbers of one rank."""

    data: int
    context: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """Sizes of one trainer."""

    ranks: int
    tensor: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for key in ("ranks", "tensor", "context"):
            if getattr(self, key) < 1:
                raise ConfigError("must be at least 1", key=key, value=getattr(self, key))
        if self.ranks % (self.tensor * self.context):
            problem = f"tensor {self.tensor} × context {self.context} do not divide {self.ranks} ranks"
            raise ConfigError(problem, key="actor_train.device_mapping", value=self.ranks)

    @property
    def data(self) -> int:
        """Copies of the model at work on different packs."""
        return self.ranks // (self.tensor * self.context)

    @property
    def shards(self) -> int:
        """Into how many pieces weights and moments are cut."""
        return self.data * self.context

    def seat(self, rank: int) -> RankCoordinates:
        """Of one rank."""
        shard, tensor = divmod(rank, self.tensor)
        data, context = divmod(shard, self.context)
        return RankCoordinates(data, context, tensor)

    def together(self, *shared: str) -> list[list[int]]:
        """Ranks that differ in nothing but `shared`, such as `data`; a list for each such set."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            seat = self.seat(rank)._asdict()
            key = tuple(number for name, number in seat.items() if name not in shared)
            found.setdefault(key, []).append(rank)
        return list(found.values())

    @property
    def sizes(self) -> dict[str, int]:
        """All of them, by name; `shards` are the pieces that weights are cut into, beside `tensor`."""
        cut = {"data": self.data, "context": self.context, "tensor": self.tensor}
        return {"ranks": self.ranks, **cut, "shards": self.shards}

    @property
    def text(self) -> str:
        """One phrase for people."""
        cut = [f"{name} {self.sizes[name]}" for name in ("data", "context", "tensor") if self.sizes[name] > 1]
        return " × ".join(cut) or "one rank"

    @property
    def summary(self) -> str:
        """The same, and what becomes of the weights."""
        return self.text + (f", weights in {self.shards} shards" if self.shards > 1 else "")
