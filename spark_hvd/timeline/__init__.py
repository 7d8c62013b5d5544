"""The timeline: recorded on every rank, gathered by rank 0, written in Chrome's trace-event format.

May import world. Doors: recorder (for ranks), collector.
"""
