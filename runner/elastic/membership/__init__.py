"""Decides which ranks are members: a state machine without a clock or a socket.

May import spark_hvd.world. Door: state.
"""
