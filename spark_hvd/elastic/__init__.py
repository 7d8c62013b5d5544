"""State and control flow that survive changes of the world, for any framework.

May import the context and what is below it. Doors: run, state.
"""
