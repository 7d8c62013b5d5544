"""Where calls by name are while they are under way: yet to be told, in memory that ranks of a host share, or in vain.

May import transport and world; nothing else of the collectives. Doors: rounds, slots, outgoing, failure.
"""
