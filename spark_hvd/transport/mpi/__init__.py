"""Collectives by the order of calls over MPI.

May import transport and world. Door: backend.
"""
