"""The one world that this process is in: joined, asked, divided, observed, left.

May import the engine and what is below it. Doors: init (users and launchers), face, standing, leave.
"""
