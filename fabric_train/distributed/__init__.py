"""Devices, ranks and parallelism, and no model. Open ``strategy.py`` first: it builds Fabric from the arguments.

- Fabric and devices: ``strategy``, ``precision``, ``devices``, ``xla``, ``memory``.
- Decoder layers: ``decoder_layers`` compiles and checkpoints them.
- Parameters and gradients, however they are sharded: ``shards``.
- Communication: ``cluster_environment`` connects the ranks, ``collectives`` exchanges data between them.
- Stops and failures: ``signals``, ``watchdog``.
"""
