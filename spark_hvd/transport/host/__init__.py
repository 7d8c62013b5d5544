"""Memory that ranks of one host share: sums in it without a socket, and huge pages for large results.

May import world and the transport. Door: shared_memory.
"""
