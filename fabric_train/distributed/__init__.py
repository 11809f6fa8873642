"""Devices, ranks and parallelism, without a model. Open ``strategy.py`` first: it builds Fabric from the arguments.

- Fabric and devices: ``strategy``, ``precision``, ``xla``, ``memory``.
- Decoder layers: ``decoder_layers`` compiles and checkpoints them.
- Ranks: ``cluster_environment`` connects them, ``ranks`` exchanges their data, ``sharded_parameters`` describes
  their parts of the parameters, ``gradients`` clips the gradient.
- Stops and failures: ``signals``, ``watchdog``.
"""
