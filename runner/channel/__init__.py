"""Communication between driver, tasks and ranks: the hub, heartbeats, frames, addresses.

May import spark_hvd.world and the keys of spark_hvd.engine. Doors: hub, frames.
"""
