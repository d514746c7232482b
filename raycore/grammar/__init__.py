"""Which tokens may come next in an output that has to be valid JSON, match a pattern, or follow a grammar.

Clients use it to refuse what can't be followed, workers to hold what is sampled to it. Both go by llguidance, which is
imported once a request asks for it.
"""
