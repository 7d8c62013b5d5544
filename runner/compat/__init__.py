"""Launchers of others by their own names: TorchDistributor, HorovodRunner and Horovod, as existing programs call them.

May import elastic and what is below it. Door: ``spark_hvd.compat``.
"""
