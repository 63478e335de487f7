"""Plan a run: its devices, processes, ranks and memory.

`plan_placement` in `placement` puts the parts together. `machine`, `ray_resources` and the two modules of requirements
look at what is there; everything else is a pure function of configuration and machine. Nothing is started here, and
nothing imports torch before it is needed. What does not fit or is not installed is refused with a `ConfigError`.
"""
