"""Collectives by the order of calls over a fixed set of ranks: process groups, key-value stores, and aborting them.

May import world and store. Doors: communicator, rendezvous.
"""
