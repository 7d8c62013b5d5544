"""Pending calls by name: not yet sent, in memory that ranks of a host share, or failed.

May import transport and world, and no other part of the collectives. Doors: rounds, slots, use, outgoing, failure.
"""
