"""The vLLM plugin: a KV connector that retains, proves and reads back, and an endpoint plugin for the handle.

The connector has two halves, as every vLLM connector: `scheduler` lives beside vLLM's scheduler and decides,
`worker` lives beside the model and moves bytes. They meet only in `metadata`. vLLM is imported nowhere else.
"""
