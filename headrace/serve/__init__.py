"""The HTTP service: OpenAI's API, with the extensions of vLLM, over one executor.

``Service`` is one frontend: it has an ``LLM`` and answers HTTP with it. It owns neither the world nor the port: ``run`` gives it a
listening socket, so that several processes can serve one port.
"""
