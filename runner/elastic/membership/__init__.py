"""Who is a member: a state machine without clock or socket.

May import spark_hvd.world. Door: state.
"""
