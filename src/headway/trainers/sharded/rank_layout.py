"""How ranks share a training step: which rank has which samples, which part of a sequence and which part of a layer.

A rank has three coordinates: its share of the packs (data), its part of every sequence (context) and its part of every
layer (tensor). Neighbours share layers, then sequences, because those exchange most. Weights, gradients and moments are
cut over data × context. This module does not need torch.
"""

from dataclasses import dataclass
from typing import NamedTuple

from headway.errors import ConfigError


class RankCoordinates(NamedTuple):
    """The position of one rank."""

    data: int
    context: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """The numbers of ranks of one trainer."""

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
        """Number of ranks, or groups of them, that work on different packs."""
        return self.ranks // (self.tensor * self.context)

    @property
    def shards(self) -> int:
        """Number of shards that weights and moments are cut into."""
        return self.data * self.context

    def coordinates(self, rank: int) -> RankCoordinates:
        """Return the coordinates of one rank."""
        shard, tensor = divmod(rank, self.tensor)
        data, context = divmod(shard, self.context)
        return RankCoordinates(data, context, tensor)

    def rank_sets(self, *shared: str) -> list[list[int]]:
        """Return the sets of ranks that differ in nothing but the coordinates `shared`, such as `data`."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            position = self.coordinates(rank)._asdict()
            key = tuple(number for name, number in position.items() if name not in shared)
            found.setdefault(key, []).append(rank)
        return list(found.values())

    @property
    def sizes(self) -> dict[str, int]:
        """All sizes by name; `shards` is the number of shards of the weights, beside `tensor`."""
        cut = {"data": self.data, "context": self.context, "tensor": self.tensor}
        return {"ranks": self.ranks, **cut, "shards": self.shards}

    @property
    def text(self) -> str:
        """The layout as a short phrase."""
        cut = [f"{name} {self.sizes[name]}" for name in ("data", "context", "tensor") if self.sizes[name] > 1]
        return " × ".join(cut) or "one rank"

    @property
    def summary(self) -> str:
        """The layout and the number of shards as a short phrase."""
        return self.text + (f", weights in {self.shards} shards" if self.shards > 1 else "")
