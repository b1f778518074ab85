"""kvloop: the KV cache's way back, from the decode engine to the prefill engine.

In disaggregated serving the decode engine holds the KV of a whole conversation when a turn ends, and
the prefill engine computes that history again when the next turn comes. kvloop leases what decode
holds, proves token by token what of it fits the next prompt, and reads it back.
"""

__version__ = "0.1.0"
