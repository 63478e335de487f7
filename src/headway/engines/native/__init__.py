"""The engine of our own: continuous batching over static KV slots, for any decoder of `transformers`.

engine   (asyncio)   requests, aborts, pauses, restarts: what the hub sees
worker   (thread)    one thread owns all torch work; commands in, deliveries out
core                 scheduler and runner, one step at a time, without threads
scheduler            queue, slots, prefixes, ends; never sees a tensor
runner               one forward of a flat batch, sampling, weights; never sees a queue
"""

from headway.engines.native.engine import NativeEngine
from headway.engines.native.settings import NativeSettings

__all__ = ["NativeEngine", "NativeSettings"]
