"""The APIs by which clients ask a model: the bodies, answers and handlers of each."""
