"""Headway's own engine: continuous batching for any decoder of `transformers`.

native_engine     (asyncio)  accepts requests: what the hub sees, on top of `ThreadedEngine`
native_core       (thread)   scheduler and runner together: single steps on a CPU, blocks of steps on a GPU
native_scheduler             queue, memory and ends; never sees a tensor
native_receiver              versions of the weights that arrive; served_parameters installs them
step_runner                  one forward pass of a flat batch on a CPU, with slot_attention and token_sampler;
                             kv_slots has the rows that sequences live in

On a GPU (`NativeSettings(device="cuda")`) several decode steps run per host synchronisation:

paged_slots, kv_pages        pages of KV: who has them, who shares them, who makes room
block_runner                 lanes, slots and prompts; steps as replayed graphs (decode_graphs); draws on the device
model_decoders               families like Llama in nine kernels a layer; any other through the attention interface
block_ops, triton_*          the operations of a step, in plain torch and in Triton
"""
