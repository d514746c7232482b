"""Predicts what a deployment does with recorded traffic, in virtual time.

The scheduler, the KV cache's bookkeeping, the routing, the client's table of requests and the policy of autoscaling are
those of the product. What is simulated is time: steps take as long as was measured (`step_times`) or as a model of the
hardware says (`roofline`). One thread runs everything in the order of events. Nothing here imports Ray or torch.
"""
