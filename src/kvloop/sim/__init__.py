"""Engines without a model: the same protocols, modelled time, and memory that shows every wrong reuse.

`engine` is a machine without I/O, clock or chance; `server` puts it behind HTTP and the control channel. What
it keeps, proves and reads back is decided by the machines of `core`, as in the connector.
"""
