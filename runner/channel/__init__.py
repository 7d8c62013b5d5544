"""How driver, task and rank hear each other: hub, heartbeats, frames, addresses.

May import spark_hvd.world. Doors: hub, frames.
"""
