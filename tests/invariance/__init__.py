"""Rearrangements: drawn batches, chunks, caches and pages whose queries have the bits of a training forward, on a Hopper GPU."""
