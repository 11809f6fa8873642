"""AdamW and the learning rate. Read ``optimizer.py`` first.

``low_precision_adamw.py`` keeps weights or moments in fewer bits than it computes in.
"""
