"""The code that runs inside a rank's process.

May import channel, outcome and the core; never the hub, supervise or pyspark. Door: main.
"""
