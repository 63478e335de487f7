"""The engine of our own: continuous batching over static KV slots, for any decoder of `transformers`.

engine   (asyncio)   requests, aborts, pauses, restarts: what the hub sees
worker   (thread)    one thread owns all torch work; commands in, deliveries out
core                 scheduler and runner, one step at a time, without threads
scheduler            queue, slots, prefixes, ends; never sees a tensor
runner               one forward of a flat batch, sampling, weights; never sees a queue

On a GPU (`NativeSettings(device="cuda")`) blocks of steps take the place of single ones:

blocks               a core that launches one block while it reads the one before
block_runner         lanes, slots, prompts; steps as replayed graphs (cuda_graphs); draws and ends on the device
decoders             the families like Llama in nine kernels a layer; any other through the attention interface
ops, triton_*        what a step is made of, in plain torch and in Triton
"""

from headway.engines.native.native_engine import NativeEngine
from headway.engines.native.settings import NativeSettings

__all__ = ["NativeEngine", "NativeSettings"]
