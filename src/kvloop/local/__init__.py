"""One machine: the models, the engine processes and their supervision, and the demo over them.

Everything here starts processes; nothing here imports vLLM or torch. An engine is a command line and an
environment (`engine`), a process tree that cannot outlive us (`supervise`), and an address (`stack`).
"""
