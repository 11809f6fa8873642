"""The optimizer and the learning rate schedule.

Open ``optimizer.py`` first: it builds AdamW, or another optimizer that declares its states (``states.py``).
``adamw.py`` keeps weights or moments in bfloat16 or 8 bits.
"""
