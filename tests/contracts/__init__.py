"""One contract suite for each protocol; an implementation plugs in by subclassing it with a factory.

`run` of a suite runs a scenario to its end: on the virtual clock here, with `asyncio.run` for real back ends.
"""
