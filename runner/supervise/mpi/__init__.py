"""Brings MPI up without ssh.

May import channel and spark_hvd.world. Door: side.
"""
