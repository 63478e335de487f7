"""Typed bounded channels between stages. A producer ends its stream with `close()`."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

from headway.errors import ChannelClosed
from headway.monitor.wait_graph import WaitGraph

T = TypeVar("T")


class Channel(Generic[T]):
    """Carries items of one type, at most `capacity` at a time, from producers to consumers, in order."""

    def __init__(
        self, name: str, item: type[T], capacity: int, *, producer: str, consumer: str, waits: WaitGraph
    ) -> None:
        if capacity < 1:
            raise ValueError(f"channel {name}: capacity {capacity} is not at least 1")
        self.name = name
        self.item = item
        self.capacity = capacity
        self.producer = producer
        self.consumer = consumer
        self._waits = waits
        self._items: deque[T] = deque()
        self._receivers: deque[asyncio.Future[None]] = deque()
        self._senders: deque[asyncio.Future[None]] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def has_room(self) -> bool:
        """Whether `put` would succeed now."""
        return len(self._items) < self.capacity

    def put(self, item: T) -> None:
        """Add an item. Raise `QueueFull` if the channel has no room."""
        self._check(item)
        if len(self._items) >= self.capacity:
            raise asyncio.QueueFull(f"channel {self.name} is full at {self.capacity}")
        self._items.append(item)
        _wake(self._receivers)

    async def send(self, item: T) -> None:
        """Wait for room and add an item."""
        self._check(item)
        await self.wait_for_room()
        self._check(item)
        self._items.append(item)
        _wake(self._receivers)

    async def wait_for_room(self) -> None:
        """Wait until `put` would succeed, or until the channel is closed."""
        while len(self._items) >= self.capacity and not self._closed:
            with self._waits.waiting(self.producer, f"room in {self.name} (full at {self.capacity})", self.consumer):
                await self._sleep(self._senders)

    async def receive(self) -> T:
        """Wait for the next item and return it. Raise `ChannelClosed` if there will be none."""
        while not self._items:
            if self._closed:
                raise ChannelClosed(self.name)
            with self._waits.waiting(self.consumer, f"an item in {self.name}", self.producer):
                await self._sleep(self._receivers)
        item = self._items.popleft()
        _wake(self._senders)
        return item

    def drain(self) -> list[T]:
        """Remove and return all items that are there now."""
        items = list(self._items)
        self._items.clear()
        for _ in items:
            _wake(self._senders)
        return items

    def close(self) -> None:
        """End the stream: receivers get what is left, then `ChannelClosed`. Calling it twice does no harm."""
        self._closed = True
        for waiter in (*self._receivers, *self._senders):
            if not waiter.done():
                waiter.set_result(None)

    def _check(self, item: T) -> None:
        if self._closed:
            raise ChannelClosed(self.name)
        if not isinstance(item, self.item):
            raise TypeError(f"channel {self.name} carries {self.item.__name__}, not {type(item).__name__}")

    async def _sleep(self, pipeline: deque[asyncio.Future[None]]) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        pipeline.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                _wake(pipeline)  # this waiter consumed the wake-up: pass it on
            raise
        finally:
            if waiter in pipeline:
                pipeline.remove(waiter)


def _wake(pipeline: deque[asyncio.Future[None]]) -> None:
    while pipeline:
        waiter = pipeline.popleft()
        if not waiter.done():
            waiter.set_result(None)
            return
