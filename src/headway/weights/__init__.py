"""Moving a version of the weights from the trainer into the engines.

`base` has the protocols. `store` is the trainer's side, `receiver` the engine's, `transport` the way between on one
machine; `flat` is the layout that both sides derive from a manifest, `segment` shared memory that cleans up.
"""
