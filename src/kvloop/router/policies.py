"""A routing policy by the name that an operator gives: a built-in one, or a class of his own.

His own is one file on Python's path with a class that has `choose` (see `core.policy`); it enters by the same
door as the built-in ones.
"""

from importlib import import_module

from kvloop.core.policy import POLICIES, Policy
from kvloop.errors import UserError


def load_policy(name: str) -> Policy:
    """The policy of that name, or `module:Class`, made without arguments. UserError if there is none."""
    if name in POLICIES:
        return POLICIES[name]()
    module, _, attribute = name.partition(":")
    if not attribute:
        raise UserError(f"--policy {name!r}: choose from {', '.join(POLICIES)}, or name a module:Class")
    try:
        made = getattr(import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"--policy {name!r}: {error}") from error
    if not callable(getattr(made, "choose", None)):
        raise UserError(f"--policy {name!r} has no method `choose`")
    policy: Policy = made
    return policy
