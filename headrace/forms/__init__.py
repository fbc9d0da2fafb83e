"""How generated answers look to clients: OpenAI's completions and chats, whole and as events of a stream. Pure.

What makes the events of one choice is made from a ``FormSpec``, which is plain data: so it is the same in the process that serves and in a
postprocess worker, and so are its bytes.
"""
