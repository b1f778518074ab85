"""Pure policy and protocol: no I/O, no clock, no random numbers, no logging, no awaiting.

Time comes in as integer nanoseconds, chance as arguments; what is to be done goes out as values. The
same machines are driven by vLLM's scheduler, by asyncio and by the simulator's event heap.
"""
