"""The same for Unischema data; the one place that knows Petastorm's insides.

May import readers. Doors: reader, bridge.
"""
