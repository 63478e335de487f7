"""Hands devices over between engines and a trainer that share them.

It hooks into the lock of the devices: before a training step every engine stops at a token boundary and, where memory
asks for it, frees its weights and its KV cache, which is a span of the timeline. The weights that the step makes bring
them back. An engine that sleeps has no version to validate, so a step waits for the answers of a validation first.
"""

from itertools import count

from headway.flow.pipeline import Pipeline
from headway.monitor.events import SpanBegin, SpanEnd

DEVICE_TURNS = "device turns"
"""Name of the lane of handovers in the timeline."""


class DeviceTurns:
    """Lets the engines of `pipeline` and its trainer take turns."""

    def __init__(self, pipeline: Pipeline, *, engines_sleep: bool) -> None:
        self._pipeline, self._engines_sleep = pipeline, engines_sleep
        self._spans = count()
        lock = pipeline.devices.locks["train"]
        lock.call_when_held(self.give_to_holder, when_free=pipeline.hub.continue_engines)
        self._lock = lock

    async def give_to_holder(self) -> None:
        """Stop the engines; before a training step let them free their memory, where they are to."""
        pipeline = self._pipeline
        sleep = self._engines_sleep and self._lock.owner == "train"
        if sleep and pipeline.updater.turn.locked():
            with pipeline.waits.waiting("train", "the answers of a validation", "validate"):
                async with pipeline.updater.turn:
                    pass
        await pipeline.hub.halt_engines()
        if sleep:
            span, events = next(self._spans), pipeline.events
            events.emit(SpanBegin(who=DEVICE_TURNS, span=span, name="engines go to sleep"))
            try:
                await pipeline.hub.put_engines_to_sleep()
            finally:
                events.emit(SpanEnd(who=DEVICE_TURNS, span=span))
