"""Collectives by the order of calls over a fixed set of ranks: process groups, stores, how they are cut.

May import world and store. Doors: communicator, rendezvous.
"""
