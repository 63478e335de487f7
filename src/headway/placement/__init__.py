"""Plan a run: its devices, processes, ranks and memory, as pure functions of configuration and machine.

`plan_placement` in `placement` puts the parts together. Nothing is started here, and nothing imports torch before it is
needed. What does not fit or is not installed is refused with a `ConfigError`.
"""
