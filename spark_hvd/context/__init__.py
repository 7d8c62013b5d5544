"""The world of this process: joining and leaving it, rank and size, process sets, and observing the rank.

May import the engine and what is below it. Doors: init (users and launchers), api, global_state, leave.
"""
