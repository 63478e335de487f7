"""A trainer over many ranks: the local learner with a mesh.

`layout` says who has what, `ranks` is the team that a learner asks, `model`, `plan` and `context` cut the weights, the
layers and the sequences, `optimizer` moves pieces, `checkpoint` writes and reads them. `trainer` is what lives in each
process, behind a `host` that has met the others first (`meeting`), and `remote` what the controller drives.
"""
