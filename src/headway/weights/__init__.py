"""Moves a version of the weights from the trainer into the engines.

`base` has the protocols. `weight_store` is the trainer's side and `weight_receiver` the engine's. Transports carry
buckets between them: `host_transports`, `disk_transport`, `broadcast_transport`, `delta_transport`, and `device_memory`
for versions that stay on a GPU. `weight_layout` is the layout that both sides derive from a manifest, and
`shared_memory` opens payloads wherever they lie. `transports` chooses the transport of a run and makes both ends.
"""
