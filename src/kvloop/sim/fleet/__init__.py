"""Whole fleets in one process, in virtual time, out of one seed: engines, routers, clients, and faults.

The engines are `kvloop.sim`'s, the rules are `core`'s, the messages are `wire`'s. What stands here is the
world between them, and checkers that stand outside of it and look at what happened.
"""
