"""How ranks of one host reach each other without a socket: shared memory, pipes.

May import world and, of the transport, dtypes, shapes, handles and waits. Door: shared_memory.
"""
