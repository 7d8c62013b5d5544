"""One rank's side of collectives by name: describes, queues, fuses and runs calls, and returns their results.

May import pending, transport, timeline and world. Doors: start, process_set.
"""
