"""One order for all ranks: the coordinator decides, the engine thread and its sockets carry.

May import collectives and what is below them. Door: engine.
"""
