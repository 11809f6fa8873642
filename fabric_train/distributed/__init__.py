"""What knows devices and ranks, and no model: strategies, collectives, gradient norm, watchdog, signals.

Read ``strategy.py`` first: it turns the arguments into a Fabric with its strategy and precision.
"""
