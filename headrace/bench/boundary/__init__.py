"""What the boundary costs: the echo engine behind it, the same engine without it, and the common design of such a boundary, in one run.

``run.measure`` measures the parts that are asked for; ``rows`` has what they give back, ``budgets`` what they are held to.
"""
