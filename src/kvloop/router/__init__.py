"""The control plane: OpenAI-compatible HTTP in, two hops out. `serve.run` is its entry point."""
