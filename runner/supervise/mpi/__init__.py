"""Starts MPI without ssh.

May import channel and spark_hvd.world. Door: launcher.
"""
