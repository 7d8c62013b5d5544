"""The launchers TorchDistributor, HorovodRunner and Horovod's, as existing programs call them, implemented by ours.

May import elastic and what is below it. Door: ``spark_hvd.compat``.
"""
