"""Collectives by name, one rank's side: described, queued, fused, run, handed back.

May import underway, transport, timeline and world. Doors: start, process_set.
"""
