"""Launchers of others by their own names: TorchDistributor and HorovodRunner, as programs that exist call them.

May import launch and what is below it. Door: ``spark_hvd.compat``.
"""
