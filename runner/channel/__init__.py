"""Communication between driver, tasks and ranks: hub, heartbeats, frames, addresses.

May import spark_hvd.world. Doors: hub, frames.
"""
