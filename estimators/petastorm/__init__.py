"""The same for Unischema data; the one place that knows Petastorm's insides.

May import readers, errors and spark_hvd.store. Doors: reader, bridge.
"""
