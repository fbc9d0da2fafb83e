"""The common design of such a boundary, to compare with: what LLM servers in Python do as a rule, without mistakes of its own.

One pickled Python object for each request and each step, in a ZMQ message with an HMAC-SHA256 of its own; a dispatch thread that checks,
unpickles and looks the request up; one put into the queue of its reader, and one wake-up, for every token. The engine behind it is the
same echo engine. It has no deadlines, no ledger, no cancelling and no end of its own when it dies: less than what it is compared with.
"""
