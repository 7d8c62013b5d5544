"""What a world is and what this process does in it, as plain data: ranks, hosts, ports, settings, errors, activity.

May import nothing of ours, and neither torch nor ZeroMQ. Doors: layout, errors.
"""
