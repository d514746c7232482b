"""What operators do to an engine that serves: one module for each capability, with the contract in `contract`.

Programs, scenarios and judges only iterate over `catalogue.CAPABILITIES`.
"""
