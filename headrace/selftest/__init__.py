"""``headrace selftest``: tiny random models in a real world, their logits beside those of a plain forward pass in numpy.

The reference shares no code with the engine: not its reading of configurations, its families, its layers or its cache.
"""
