"""Devices, ranks and parallelism. Open ``strategy.py`` first: it builds Fabric from the arguments.

- Fabric and devices: ``strategy``, ``fsdp``, ``precision``, ``devices``, ``xla``, ``host_memory``.
- Limits of the machine: ``resources``, ``control_groups``.
- Decoder layers: ``tensor_parallel``, ``float8``, ``compile``, ``activation_checkpoint``.
- Parameters and gradients, however they are sharded: ``shards``, ``grad_norm``.
- Communication: ``rendezvous`` connects the ranks, ``collectives`` exchanges data between them.
- Stops and failures: ``signals``, ``heartbeat``, ``watchdog``.

No module here knows a model family; ``model/parallelize.py`` applies these modules to a model.
"""
