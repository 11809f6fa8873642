"""AdamW and the learning rate schedule.

Open ``optimizer.py`` first. ``low_precision_adamw.py`` keeps weights or moments in bfloat16 or 8 bits.
"""
