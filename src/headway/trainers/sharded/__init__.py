"""A trainer over many ranks: the local learner with its weights, layers and sequences cut over processes.

`rank_layout` says which rank has what. `sharded_model` and
`context_parallel` cut weights, layers and sequences, `sharded_optimizer` updates shards, `sharded_checkpoint` writes
and reads them. `sharded_trainer` lives in each process behind a `rank_host`, and `ranked_trainer` is what the
controller uses.
"""
