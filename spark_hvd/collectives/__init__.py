"""One rank's side of collectives by name: describes, queues, fuses and runs calls, and returns their results.

May import underway, transport, timeline and world. Doors: start, process_set.
"""
