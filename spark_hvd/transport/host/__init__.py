"""Memory that the ranks of one host share: they wait for each other and sum in it; huge pages for large results.

May import world and the transport. Doors: pipes, synchronization, shared_memory, hierarchy, sliced.
"""
