"""Calls by name in flight: not yet sent, in memory that ranks of a host share, or failed.

May import transport and world; nothing else of the collectives. Doors: rounds, slots, use, outgoing, failure.
"""
